"""Checks of the settings of linear attention."""

from __future__ import annotations

from ... import checks

CUTOFF = 6  # pixels, as in the Relative Performer's paper


def check_position(
    position: str | None, offset: str | None, values: str, edge_dim: int | None, method: str | None
) -> None:
    """Raise ValueError for settings that a kind of positions does not use."""
    if position != "window":
        far = position is None and values != "content" and offset == "distance"
        for name, value, default in (("offset", "table" if far else offset, "table"), ("edge_dim", edge_dim, None)):
            if value != default:
                raise ValueError(
                    f"{name} must be {default!r} with position={position!r}, got {value!r}; for edges between nodes "
                    "without positions pass position='window', offset=None"
                )
    elif offset is None and values != "content":
        raise ValueError(f"values must be 'content' with offset=None, got {values!r}")
    if position in ("clipped", "sinusoid") and values != "content":
        raise ValueError(f"values must be 'content' with position={position!r}, got {values!r}")
    if position == "clipped" and method == "pairs":
        raise ValueError("method must be 'features' with position='clipped', got 'pairs'")


def cutoff_of(position: str | None, cutoff: float | None, offset: str | None) -> float:
    """The cutoff of a layer, or its default. Raise ValueError if it does not fit the kind of positions."""
    if offset is None:
        if cutoff is not None:
            raise ValueError(f"cutoff must be None with offset=None, got {cutoff}: edges are the near pairs")
        return 1.0
    if cutoff is None and offset != "table":
        raise ValueError(
            f"cutoff must be given with offset={offset!r}: a length in the unit of pos, for example "
            "2 * mean_edge_length(pos, edge_index)"
        )
    cutoff = CUTOFF if cutoff is None else cutoff
    if position == "clipped" or (position == "window" and offset == "table"):
        checks.positive(cutoff=cutoff)  # type: ignore[arg-type]
    else:
        checks.positive_number(cutoff=cutoff)
    return cutoff
