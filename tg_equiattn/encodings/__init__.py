"""Positional encodings that families share: of offsets, directions, distances and group elements."""

from .group import relation_index

__all__ = ["relation_index"]
