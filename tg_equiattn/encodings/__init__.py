"""Positional encodings of all families: of offsets, distances, directions and group elements."""

from .group import relation_index, rotated_offsets

__all__ = ["relation_index", "rotated_offsets"]
