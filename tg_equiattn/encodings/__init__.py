"""Positional encodings of all families: of offsets, distances, directions and group elements."""

from .group import (
    ENCODINGS,
    RELATIONS,
    AxialEncoding,
    FullEncoding,
    JointEncoding,
    make_encoding,
    relation_index,
    rotated_offsets,
)
from .harmonics import solid_harmonics, spherical_bessel
from .locality import CONTENT, Locality, starting_places
from .positions import AbsoluteEncoding, OffsetDistance, OffsetMLP, OffsetTable, OffsetValues, SinusoidEncoding

__all__ = [
    "CONTENT",
    "ENCODINGS",
    "RELATIONS",
    "AbsoluteEncoding",
    "AxialEncoding",
    "FullEncoding",
    "JointEncoding",
    "Locality",
    "OffsetDistance",
    "OffsetMLP",
    "OffsetTable",
    "OffsetValues",
    "SinusoidEncoding",
    "make_encoding",
    "relation_index",
    "rotated_offsets",
    "solid_harmonics",
    "spherical_bessel",
    "starting_places",
]
