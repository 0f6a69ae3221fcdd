"""From the name of a kind of positions to the kind."""

from __future__ import annotations

from ... import checks
from .near_positions import OFFSETS, ClippedPosition, WindowPosition
from .positions import AbsolutePosition, Position, SinusoidPosition

POSITIONS = ("window", "clipped", "sinusoid", "absolute", None)
VALUES = ("content", "offset")


def make_position(
    position: str | None,
    *,
    in_channels: int,
    heads: int,
    head_channels: int,
    pos_dim: int,
    max_distance: float | str,
    offset: str,
    values: str,
    edge_dim: int | None,
    position_heads: int | None,
    scale: float | None,
) -> Position:
    """The kind of positions of a name; nowhere else is asked which it is."""
    checks.choice("offset", offset, OFFSETS)
    checks.choice("values", values, VALUES)
    if edge_dim is not None:
        checks.positive(edge_dim=edge_dim)
    if position != "window" and (values != "content" or edge_dim is not None):
        raise ValueError(
            f"values='offset' and edge_dim must be with position='window', got values={values!r}, edge_dim={edge_dim} "
            f"with {position!r}"
        )
    if position == "window":
        return WindowPosition(heads, pos_dim, scale, max_distance, offset, values, head_channels, edge_dim)
    if position == "clipped":
        return ClippedPosition(heads, pos_dim, scale, max_distance, head_channels, position_heads)
    if position == "sinusoid":
        return SinusoidPosition(heads, pos_dim, scale)
    if position == "absolute":
        return AbsolutePosition(heads, pos_dim, scale, in_channels)
    if position is None:
        return Position(heads, pos_dim, scale)
    raise ValueError(f"position must be one of {POSITIONS}, got {position!r}")
