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
from .locality import CONTENT, Locality, starting_places
from .positions import AbsoluteEncoding, OffsetMLP, OffsetTable, SinusoidEncoding

__all__ = [
    "CONTENT",
    "ENCODINGS",
    "RELATIONS",
    "AbsoluteEncoding",
    "AxialEncoding",
    "FullEncoding",
    "JointEncoding",
    "Locality",
    "OffsetMLP",
    "OffsetTable",
    "SinusoidEncoding",
    "make_encoding",
    "relation_index",
    "rotated_offsets",
    "starting_places",
]
