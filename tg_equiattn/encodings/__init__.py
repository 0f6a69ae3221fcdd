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
from .positions import AbsoluteEncoding, OffsetMLP, OffsetTable, SinusoidEncoding

__all__ = [
    "ENCODINGS",
    "RELATIONS",
    "AbsoluteEncoding",
    "AxialEncoding",
    "FullEncoding",
    "JointEncoding",
    "OffsetMLP",
    "OffsetTable",
    "SinusoidEncoding",
    "make_encoding",
    "relation_index",
    "rotated_offsets",
]
