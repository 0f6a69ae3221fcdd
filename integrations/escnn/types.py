"""Convert gspaces to groups and field types to channel counts, and map between field types."""

from __future__ import annotations

import numpy as np
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, R2Conv, R3Conv

from tg_equiattn.groups import FiniteGroup

from .masks import MaskedSequential


def group_from_gspace(gspace: GSpace) -> FiniteGroup:
    """The finite group of a discrete gspace of images or volumes. Its elements have the order of
    ``gspace.fibergroup.elements``.

    For images, the matrices are those of ``gspace.basespace_action``. For volumes, the axes of escnn are (-z, -y, x)
    and ours are (z, -y, x). An element with the matrix M in escnn therefore has the matrix S M S here, with S = diag(1,
    1, -1).

    Args:
        gspace (GSpace): A discrete gspace of dimensionality 2 or 3.

    Raises:
        ValueError: if ``gspace`` is continuous (``N=-1``), or not a gspace of images or volumes.

    Example:
        >>> from escnn import gspaces
        >>> group_from_gspace(gspaces.flipRot2dOnR2(4))
        D4_on_R2(order=8, dim=2)
        >>> group_from_gspace(gspaces.mirOnR3())
        C2_on_R3(order=2, dim=3)
    """
    _check_gspace(gspace)
    matrices = np.stack([gspace.basespace_action(element) for element in gspace.fibergroup.elements])
    if gspace.dimensionality == 3:
        down = np.diag([1.0, 1.0, -1.0])
        matrices = down @ matrices @ down
    return FiniteGroup(matrices, name=str(gspace.name).split("[")[0])


def _check_gspace(gspace: GSpace) -> None:
    if not isinstance(gspace, GSpace):
        raise ValueError(f"gspace must be an escnn.gspaces.GSpace, got {type(gspace).__name__}")
    if gspace.dimensionality not in (2, 3):
        raise ValueError(
            f"gspace must be one of images or volumes, got {gspace} of dimensionality {gspace.dimensionality}"
        )
    if gspace.fibergroup.order() < 1:
        advice = "use a discrete gspace, n > 0"
        known = _SUBGROUPS.get((gspace.dimensionality, gspace.fibergroup.name))
        if known is not None:  # escnn cannot restrict fields of other groups
            subgroup, where, group = known
            advice = (
                f"restrict the fields to a subgroup with escnn.nn.RestrictionModule(fields, {subgroup}){where}, and "
                f"use its out_type: the model is then equivariant to {group}"
            )
        raise ValueError(f"gspace must be discrete, got {gspace}, which is continuous; {advice}")


_SUBGROUPS = {
    (2, "SO(2)"): ("N", ", N > 0", "C_N"),
    (2, "O(2)"): ("(axis, N)", ", N > 0", "D_N"),
    (3, "SO(3)"): ("'octa'", "", "the rotations of the cube"),
    (3, "O(3)"): ("(True, 'octa')", "", "the rotations and reflections of the cube"),
}


def check_field_type(name: str, field_type: FieldType) -> None:
    if not isinstance(field_type, FieldType):
        raise ValueError(f"{name} must be an escnn.nn.FieldType, got {type(field_type).__name__}")
    _check_gspace(field_type.gspace)


def _conversion(gspace: GSpace, source: str, target: str, kind: str) -> str:
    return (
        f"escnn.nn.R{gspace.dimensionality}Conv({source}, {target}, kernel_size=1), "
        f"fields = escnn.nn.FieldType(gspace, n * [gspace.{kind}_repr])"
    )


def count_fields(name: str, field_type: FieldType, regular: bool) -> int:
    """The number of fields of a type that must consist of regular fields, or of trivial fields. For other types, raise
    a ValueError that names a conversion."""
    check_field_type(name, field_type)
    gspace, representations = field_type.gspace, field_type.representations
    group, layers = gspace.fibergroup, f"R{gspace.dimensionality}"
    trivial = all(r.is_trivial() for r in representations)
    # the regular and the trivial representation of the trivial group are equal
    is_regular = all(r == gspace.regular_repr or (group.order() == 1 and r.is_trivial()) for r in representations)
    if is_regular if regular else trivial:
        return len(field_type)
    source, target = ("fields", name) if regular and name == "out_type" else (name, "fields")
    convert = _conversion(gspace, source, target, "regular")
    if not regular:
        advice = f"use {layers}GroupAttention" + (", which takes regular fields" if is_regular else f" after {convert}")
        # without a trivial irrep, every equivariant pointwise map to trivial fields is zero
        if any(group.irrep(*i).is_trivial() for r in representations for i in r.irreps):
            advice += f"; or keep only the invariant part, with {_conversion(gspace, name, 'fields', 'trivial')}"
    elif name == "in_type" and trivial:
        advice = f"lift trivial fields with {layers}LiftingAttention, or convert with {convert}"
    else:
        advice = f"convert with {convert}"
        if name != "context_type":  # between_fields takes no contexts
            advice += "; or put the layer between fields of this type with between_fields(in_type, layer, out_type)"
    kind = "regular" if regular else "trivial"
    raise ValueError(f"{name} must consist of {kind} fields, got {field_type}; {advice}")


def between_fields(in_type: FieldType, layer: EquivariantModule, out_type: FieldType) -> MaskedSequential:
    r"""Use a layer of regular or trivial fields between fields of any type: irreps, quotients, vectors, mixed fields.

    .. math:: \mathrm{Conv}_{1\times 1} \to \mathrm{layer} \to \mathrm{Conv}_{1\times 1}

    The convolutions are equivariant pointwise maps, ``R2Conv`` or ``R3Conv`` with ``kernel_size=1``. A convolution is
    left out if its type is that of the layer. The result is a :class:`MaskedSequential`, which takes masks but no
    contexts.

    Args:
        in_type (FieldType): Field type of the input, of the gspace of the layer.
        layer (EquivariantModule): An attention layer or block of this package, or any other escnn module.
        out_type (FieldType): Field type of the output, of the gspace of the layer.

    Raises:
        ValueError: if ``layer`` is not an escnn module, if a type has another gspace, or if every equivariant linear
            map between a type and the layer's type is zero.

    Example:
        >>> from escnn import gspaces, nn
        >>> from tg_equiattn.integrations.escnn import R2GroupAttention
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> vectors = nn.FieldType(gspace, 5 * [gspace.irrep(1)])
        >>> mixed = nn.FieldType(gspace, 3 * [gspace.trivial_repr] + 2 * [gspace.irrep(2)])
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> model = between_fields(vectors, R2GroupAttention(hidden, hidden, heads=2), mixed)
        >>> model.evaluate_output_shape((1, 10, 9, 9))
        (1, 5, 9, 9)
    """
    if not isinstance(layer, EquivariantModule):
        raise ValueError(f"layer must be an escnn.nn.EquivariantModule, got {type(layer).__name__}")
    for name, field_type in (("in_type", in_type), ("out_type", out_type)):
        check_field_type(name, field_type)
        if field_type.gspace != layer.in_type.gspace:
            raise ValueError(
                f"{name} must have the gspace of the layer, {layer.in_type.gspace}, got {field_type.gspace}"
            )
    before = _pointwise("in_type", in_type, in_type, layer.in_type)
    return MaskedSequential(*before, layer, *_pointwise("out_type", out_type, layer.out_type, out_type))


def _pointwise(name: str, given: FieldType, source: FieldType, target: FieldType) -> list[EquivariantModule]:
    """The pointwise map between two types, as a list, which is empty if the types are equal. Raise ValueError if every
    such map is zero."""
    if source == target:
        return []
    irreps = [{irrep for r in field_type.representations for irrep in r.irreps} for field_type in (source, target)]
    if not irreps[0] & irreps[1]:
        other = target if given is source else source
        raise ValueError(
            f"{name} must share an irreducible representation with the layer's {other}, got {given}: every equivariant "
            "linear map between them is zero"
        )
    convolution = R2Conv if source.gspace.dimensionality == 2 else R3Conv
    return [convolution(source, target, kernel_size=1)]
