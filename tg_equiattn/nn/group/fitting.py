"""What layers take where nothing is said: by their group; and what a group does not allow."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ... import checks
from ...encodings.group import RELATIONS
from ...groups import DilationGroup, FiniteGroup


def fitting_shape(group: FiniteGroup, kernel_size: int | None) -> str:
    """A disk where the group has elements that do not map a square window to itself."""
    return "square" if kernel_size is None or bool(group.lattice.all()) else "disk"


def fitting_sharpness(group: FiniteGroup, locality: float | str | None) -> float | None:
    """Where elements do not map pixels to pixels, broad places, which lie between pixels as well as on them."""
    if locality == "auto":
        return 4.0 if bool(group.lattice.all()) else 1.0
    if isinstance(locality, str):
        raise ValueError(f"locality must be 'auto', None or a finite number of at least 0, got {locality!r}")
    return locality


def window_of_scales(
    group: FiniteGroup | DilationGroup, kernel_size: int | None, scale_window: int | None
) -> int | None:
    """How many scales a scale attends to, None without scales; ValueError for what dilations do not allow."""
    if not isinstance(group, DilationGroup):
        if scale_window is not None:
            raise ValueError(f"scale_window must be None but for groups of scales (dyadic), got {scale_window!r}")
        return None
    if kernel_size is None:
        raise ValueError(
            "kernel_size must be a positive odd integer for groups of scales (dyadic), got None: with all pixels in "
            "every window, a dilation of the image is none of the offsets"
        )
    largest = 2 * group.scales - 1
    scale_window = min(3, largest) if scale_window is None else scale_window
    odd = not isinstance(scale_window, bool) and isinstance(scale_window, int) and scale_window % 2 == 1
    if not odd or not 1 <= scale_window <= largest:
        raise ValueError(
            f"scale_window must be an odd integer from 1 to {largest} with {group.scales} scales, got {scale_window!r}"
        )
    return scale_window


def fitting_content(
    heads: int, content_heads: int | None, frames: bool, kernel_size: int | None, locality: float | None
) -> int:
    """How many heads look by content; ValueError for more than there are, or for a relation without such a choice."""
    if not frames:
        if content_heads is not None:
            raise ValueError(f"content_heads must be None but for relation 'frame', got {content_heads!r}")
        return heads
    if content_heads is None:
        return heads if kernel_size is None or locality is None else -(-heads // 8)
    if isinstance(content_heads, bool) or not isinstance(content_heads, int) or not 0 <= content_heads <= heads:
        raise ValueError(f"content_heads must be an integer from 0 to heads={heads}, got {content_heads!r}")
    if content_heads < heads and locality is None:
        raise ValueError(
            f"content_heads must be heads={heads} without locality, by which the others look, got {content_heads}"
        )
    return content_heads


def fitting_relation(group: FiniteGroup | DilationGroup, relation: str | None) -> str:
    scales = isinstance(group, DilationGroup)
    if relation is None:
        return "relative" if scales else "frame"
    checks.choice("relation", relation, ("frame", *RELATIONS))
    if scales and relation != "relative":
        raise ValueError(
            f"relation must be 'relative' for groups of scales (dyadic), got {relation!r}, which compares the query of "
            "one element with the keys in the window of another: windows of two scales hold different pixels"
        )
    return relation


def fitting_norm(group: FiniteGroup | DilationGroup, norm: str | None) -> str:
    """Of every channel, which trains best; one mean for all would mix scales, where there are some."""
    scales = isinstance(group, DilationGroup)
    if norm is None:
        return "batch"
    if scales and norm == "global":
        raise ValueError(
            "norm must be 'batch' or 'layer' for groups of scales (dyadic), got 'global': the mean over all scales "
            "changes where features move up one, because the last has nowhere to go"
        )
    return norm


def check_keywords(name: str, given: Iterable[str], *kinds: Any) -> None:
    """TypeError, which names the class the user wrote, for keyword arguments that none of these constructors have."""
    known = {key for kind in kinds for key in inspect.signature(kind).parameters}
    if unknown := sorted(set(given) - known):
        raise TypeError(f"{name} got unexpected keyword arguments: {', '.join(unknown)}")


def check_whole(group: FiniteGroup | DilationGroup, **sizes: object) -> None:
    """ValueError for pools and crops (if any) of a model with scales."""
    for name, size in sizes.items():
        if isinstance(group, DilationGroup) and size:
            raise ValueError(
                f"{name} must be {0 if isinstance(size, int) else ()} for groups of scales (dyadic), got {size!r}: "
                "of an image twice as large it would have to be twice as large"
            )
