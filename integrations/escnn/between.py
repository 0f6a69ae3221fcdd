"""Layers of regular fields between fields of any type."""

from __future__ import annotations

from escnn.nn import EquivariantModule, FieldType, R2Conv, R3Conv, SequentialModule

from .types import check_field_type


def between_fields(in_type: FieldType, layer: EquivariantModule, out_type: FieldType) -> SequentialModule:
    r"""A layer of regular (or trivial) fields between fields of any type: irreps, quotients, vectors, mixed ones.

    .. math:: \mathrm{Conv}_{1\times 1} \to \mathrm{layer} \to \mathrm{Conv}_{1\times 1}

    A linear map of single pixels that commutes with the group, an ``R2Conv`` or ``R3Conv``, takes ``in_type`` to the
    layer's own type, and another one takes what comes out to ``out_type``. Where a type is the layer's own, there is no
    map. What comes is escnn's ``SequentialModule``, which hands on neither masks nor contexts.

    Args:
        in_type (FieldType): any fields of the layer's gspace.
        layer: an attention layer or block of this package, or any module between field types.
        out_type (FieldType): any fields of the gspace.

    Raises:
        ValueError: for other gspaces, or where no linear map leads from one type to the other.

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
    return SequentialModule(*before, layer, *_pointwise("out_type", out_type, layer.out_type, out_type))


def _pointwise(name: str, given: FieldType, source: FieldType, target: FieldType) -> list[EquivariantModule]:
    """The map between two types, if they differ; ValueError if there is none but zero."""
    if source == target:
        return []
    irreps = [{irrep for r in field_type.representations for irrep in r.irreps} for field_type in (source, target)]
    if not irreps[0] & irreps[1]:
        own = target if given is source else source
        raise ValueError(
            f"{name} must share an irreducible representation with the layer's {own}, or every linear map is zero, "
            f"got {given}"
        )
    convolution = R2Conv if source.gspace.dimensionality == 2 else R3Conv
    return [convolution(source, target, kernel_size=1)]
