"""Defaults of group attention that depend on other arguments."""

from __future__ import annotations

import warnings

import torch

from .. import checks
from ..grids import Window
from ..groups import FiniteGroup
from .encodings import INDEXED, RELATIONS


def check_relation(relation: str) -> None:
    """Raise ValueError for a relation that does not exist, and warn of one that is not equivariant."""
    checks.choice("relation", relation, ("frame", *INDEXED))
    if not RELATIONS[relation].equivariant:
        warnings.warn(
            f"relation={relation!r} (GSA-Nets section 5.2) is not equivariant and serves to reproduce the papers' "
            "comparison; use 'frame', 'ge_vit', 'lifted' or 'relative' for an equivariant layer",
            stacklevel=4,
        )


def default_encoding(
    encoding: str | None, relation: str | None, kernel_size: int | tuple[int, ...] | None,
    locality: float | str | None,
) -> str | None:  # fmt: skip
    """The encoding: by default ``"rotary"`` where each output has one query (relation ``None`` is lifting), over all
    pixels without locality, else ``"axial"``. Raise ValueError for rotary positions where they are not possible."""
    one_query = relation in (None, "frame", "relative")
    if encoding == "auto":
        return "rotary" if one_query and kernel_size is None and locality in (None, "auto") else "axial"
    if encoding != "rotary":
        return encoding
    if not one_query:
        raise ValueError(
            f"encoding must not be 'rotary' with relation={relation!r}, which sums over query elements: queries "
            "and keys are rotated in the frame of one element; use relation='frame' or 'relative', or encoding='axial'"
        )
    if kernel_size is not None:
        raise ValueError(
            f"encoding must not be 'rotary' with kernel_size={kernel_size!r}: rotary positions serve attention to all "
            "pixels by torch's fused kernels, and windows, also circular ones, need the offset of each key; use "
            "encoding='axial', or, in lifting and group attention, kernel_size=None"
        )
    if locality not in (None, "auto"):
        raise ValueError(
            f"locality must be None or 'auto' with encoding='rotary', got {locality!r}: it is a table over offsets, "
            "which torch's fused kernels do not take; use encoding='axial'"
        )
    return encoding


def default_strength(
    locality: float | str | None, lattice: bool, encoding: str | None, kernel_size: int | tuple[int, ...] | None
) -> float | None:
    """The initial strength of the locality in 1 / pixel^2; ``None``, the default over all pixels, means no locality.
    Raise ValueError if ``encoding=None``, attention by content only, is combined with arguments that need offsets."""
    if encoding is None and kernel_size is not None:
        raise ValueError(
            f"kernel_size must be None with encoding=None, got {kernel_size!r}: a window depends on offsets. Set an "
            "encoding or kernel_size=None"
        )
    if encoding is None and locality not in (None, "auto"):
        raise ValueError(
            f"locality must be None or 'auto' with encoding=None, got {locality!r}: it depends on offsets. Set an "
            "encoding or locality=None"
        )
    if locality == "auto":
        return None if kernel_size is None else (4.0 if lattice else 1.0)
    if isinstance(locality, str):
        raise ValueError(f"locality must be 'auto', None or a finite number of at least 0, got {locality!r}")
    return locality


def default_content_heads(
    content_heads: int | None, heads: int, strength: float | None, crosses: bool, default: int
) -> int:
    """The number of heads with content."""
    content_heads = default if content_heads is None else content_heads
    if not 0 <= content_heads <= heads:
        raise ValueError(f"content_heads must be an integer from 0 to heads={heads}, got {content_heads!r}")
    if content_heads < heads and strength is None:
        raise ValueError(
            f"content_heads={content_heads} needs locality: heads without content weight pixels by position only. Set "
            f"locality, for example to 4.0, with encoding='axial' or 'joint', or content_heads={heads}"
        )
    if crosses and not content_heads:
        raise ValueError(
            "content_heads must be at least 1 with a context, got 0: heads without content have no queries, so the "
            "output would not depend on the input"
        )
    return content_heads


def check_sides(group: FiniteGroup, window: Window) -> None:
    """Raise ValueError unless every group element maps the window's sides to themselves."""
    if not isinstance(window.kernel_size, tuple):
        return
    sides = torch.tensor(window.sides[::-1], device="cpu")  # those of the axes x, y (and z)
    if bool((group.matrices[:, sides[:, None] != sides].abs() > 1e-6).any()):
        raise ValueError(
            f"kernel_size must have equal sides along axes that elements of {group!r} exchange, got "
            f"{window.kernel_size}; use one side for all axes, or a group that keeps the window: in images reflections "
            "and the half turn, in volumes with sides (a, b, b) rotations about the first axis"
        )


def check_stride(stride: int, window: Window, crosses: bool) -> None:
    """Raise ValueError for strides that the layer does not have. ``crosses`` is true with ``context_channels``."""
    if stride not in (1, 2):
        raise ValueError(f"stride must be 1 or 2, got {stride!r}")
    if stride > 1 and (window.is_global or window.circular):
        raise ValueError(
            f"stride must be 1 with kernel_size=None or padding_mode='circular', got {stride}: every second pixel "
            "needs a window that ends at the border"
        )
    if stride > 1 and crosses:
        raise ValueError(f"stride must be 1 with context_channels, got {stride}: keys are all pixels of the input")
