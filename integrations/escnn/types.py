"""From gspaces and field types to groups and channel counts."""

from __future__ import annotations

import numpy as np
from escnn.gspaces import GSpace
from escnn.nn import FieldType

from tg_equiattn.groups import FiniteGroup


def group_from_gspace(gspace: GSpace) -> FiniteGroup:
    """The finite group of a discrete planar gspace, its elements in the order of ``gspace.fibergroup.elements``.

    Raises:
        ValueError: for a continuous gspace (``N=-1``) or one that is not planar.

    Example:
        >>> from escnn import gspaces
        >>> group_from_gspace(gspaces.flipRot2dOnR2(4))
        D4_on_R2(order=8, dim=2)
    """
    if not isinstance(gspace, GSpace):
        raise ValueError(f"gspace must be an escnn.gspaces.GSpace, got {type(gspace).__name__}")
    if gspace.dimensionality != 2:
        raise ValueError(f"gspace must be planar, got {gspace} of dimensionality {gspace.dimensionality}")
    if gspace.fibergroup.order() < 1:
        raise ValueError(
            f"gspace must be discrete, got {gspace}, which is continuous; "
            f"use rot2dOnR2(N) or flipRot2dOnR2(N) with N > 0"
        )
    matrices = np.stack([gspace.basespace_action(element) for element in gspace.fibergroup.elements])
    return FiniteGroup(matrices, name=str(gspace.name).split("[")[0])


def _check_field_type(name: str, field_type: FieldType) -> None:
    if not isinstance(field_type, FieldType):
        raise ValueError(f"{name} must be an escnn.nn.FieldType, got {type(field_type).__name__}")


def _conversion(source: str, target: str, kind: str) -> str:
    return (
        f"convert with escnn.nn.R2Conv({source}, {target}, kernel_size=1), "
        f"fields = escnn.nn.FieldType(gspace, n * [gspace.{kind}_repr])"
    )


def trivial_channels(name: str, field_type: FieldType) -> int:
    """The number of trivial fields; ValueError, with the convolution that converts, for other types."""
    _check_field_type(name, field_type)
    if not all(r.is_trivial() for r in field_type.representations):
        group = field_type.gspace.fibergroup
        holds_trivial = any(group.irrep(*i).is_trivial() for r in field_type.representations for i in r.irreps)
        advice = _conversion(name, "fields", "trivial")
        if not holds_trivial:  # no linear map of single pixels leads from these to trivial fields
            advice = f"{_conversion(name, 'fields', 'regular')}, and use R2GroupAttention"
        raise ValueError(f"{name} must consist of trivial fields, got {field_type}; {advice}")
    return len(field_type)


def regular_channels(name: str, field_type: FieldType) -> int:
    """The number of regular fields; ValueError, with the convolution that converts, for other types."""
    _check_field_type(name, field_type)
    group_from_gspace(field_type.gspace)
    regular = field_type.gspace.regular_repr
    alone = field_type.gspace.fibergroup.order() == 1  # all fields of the trivial group are regular
    if not all(r == regular or (alone and r.is_trivial()) for r in field_type.representations):
        source, target = (name, "fields") if name == "in_type" else ("fields", name)
        advice = _conversion(source, target, "regular")
        raise ValueError(f"{name} must consist of regular fields, got {field_type}; {advice}")
    return len(field_type)


def common_gspace(in_type: FieldType, out_type: FieldType) -> GSpace:
    """The gspace of both types; ValueError if they differ."""
    _check_field_type("in_type", in_type)
    _check_field_type("out_type", out_type)
    if in_type.gspace != out_type.gspace:
        raise ValueError(f"out_type must have the gspace of in_type, {in_type.gspace}, got {out_type.gspace}")
    return in_type.gspace
