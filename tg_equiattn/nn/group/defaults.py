"""Defaults of group attention that depend on other arguments, and what groups of scales allow."""

from __future__ import annotations

from ... import checks
from ...encodings.group import RELATIONS
from ...groups import DilationGroup, FiniteGroup


def default_scale_window(
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
    if type(scale_window) is not int or scale_window not in range(1, largest + 1, 2):
        raise ValueError(
            f"scale_window must be an odd integer from 1 to {largest} with {group.scales} scales, got {scale_window!r}"
        )
    return scale_window


def default_relation(group: FiniteGroup | DilationGroup, relation: str | None) -> str:
    """``"frame"``, and with scales ``"relative"``, which is all that they allow."""
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


def check_encoding(encoding: str | None, kernel_size: int | None, locality: float | str | None) -> None:
    """ValueError where ``encoding=None``, which leaves content alone, meets arguments that depend on offsets."""
    if encoding is not None:
        return
    if kernel_size is not None:
        raise ValueError(
            f"kernel_size must be None with encoding=None, got {kernel_size!r}: a window depends on offsets"
        )
    if locality not in (None, "auto"):
        raise ValueError(f"locality must be None or 'auto' with encoding=None, got {locality!r}: it depends on offsets")


def default_locality(locality: float | str | None, lattice: bool, encoding: str | None) -> float | None:
    """The strength of the locality at the start; ``None`` without one."""
    if locality == "auto":
        return None if encoding is None else (4.0 if lattice else 1.0)
    if isinstance(locality, str):
        raise ValueError(f"locality must be 'auto', None or a finite number of at least 0, got {locality!r}")
    return locality


def default_content_heads(
    content_heads: int | None, heads: int, relation: str | None, strength: float | None, *, by_place: bool
) -> int:
    """How many heads have content: an eighth, rounded up, where the others may look ``by_place`` alone."""
    if content_heads is None:
        return -(-heads // 8) if by_place and strength is not None else heads
    if relation != "frame":
        raise ValueError(f"content_heads must be None but for relation 'frame', got {content_heads!r}")
    if type(content_heads) is not int or not 0 <= content_heads <= heads:
        raise ValueError(f"content_heads must be an integer from 0 to heads={heads}, got {content_heads!r}")
    if content_heads < heads and strength is None:
        raise ValueError(
            f"content_heads={content_heads} needs locality: heads without content weight pixels by position only. Set "
            f"locality or content_heads={heads}"
        )
    return content_heads


def check_scales(group: FiniteGroup | DilationGroup, norm: str = "batch", **sizes: object) -> None:
    """ValueError for what models with scales cannot have: a mean over all of them, pools and crops."""
    if not isinstance(group, DilationGroup):
        return
    if norm == "global":
        raise ValueError(
            "norm must be 'batch' or 'layer' for groups of scales (dyadic), got 'global': the mean over all scales "
            "changes where features move up one, because the last has nowhere to go"
        )
    for name, size in sizes.items():
        if size:
            raise ValueError(
                f"{name} must be {0 if isinstance(size, int) else ()} for groups of scales (dyadic), got {size!r}: "
                "of an image twice as large it would have to be twice as large"
            )
