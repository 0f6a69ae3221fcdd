"""Positional encodings of all families: of offsets, distances, directions and group elements."""

from .group import relation_index

__all__ = ["relation_index"]
