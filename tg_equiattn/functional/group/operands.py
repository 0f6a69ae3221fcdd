"""Checks of the operands of attention on grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks
from ...grids import Window

if TYPE_CHECKING:
    from jaxtyping import Int


def check_features(query: Tensor, key: Tensor, value: Tensor, other_pixels: bool = False) -> None:
    """Raise ValueError unless queries, keys and values are ``(B, heads, channels, elements, *spatial)``, of one dtype
    and device, and of one image size. With ``other_pixels``, keys and values may have another size than queries."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (6, 7):
            raise ValueError(f"{name} must have shape (B, heads, C, |H|, *spatial), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
        if x.device != query.device or x.dtype != query.dtype:
            raise ValueError(f"{name} must be {query.dtype} on {query.device} as query is, got {x.dtype} on {x.device}")
    if key.ndim != query.ndim or key.shape[:4] != query.shape[:4]:
        raise ValueError(f"key must have the shape of query, {tuple(query.shape)}, got {tuple(key.shape)}")
    if key.shape != query.shape and not other_pixels:
        raise ValueError(
            f"key must have the shape of query, {tuple(query.shape)}, got {tuple(key.shape)}; for keys from an image "
            "of another size, use a global window (kernel_size=None) with offset_encoding=None and space_bias=None"
        )
    if value.shape[:2] != key.shape[:2] or value.shape[3:] != key.shape[3:]:
        raise ValueError(
            f"value must have the shape of key, {tuple(key.shape)}, with any number of channels (axis 2), got "
            f"{tuple(value.shape)}"
        )
    if min(key.shape[4:]) < 1:
        raise ValueError(f"key must have at least one pixel on every spatial axis, got {tuple(key.shape)}")


def _other_pixels(window: Window, *encodings: Tensor | None) -> bool:
    """True if keys may come from an image of another size: with a global window, if nothing depends on offsets."""
    return isinstance(window, Window) and window.is_global and not any(x is not None for x in encodings)


def check_tensors(query: Tensor, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each tensor is None, or floating point, on the device of the queries and of the expected
    shape. Arguments are pairs of a tensor and its shape, by name."""
    for name, (x, expected) in tensors.items():
        if x is None:
            continue
        if x.device != query.device:
            raise ValueError(f"{name} must be on {query.device} as query is, got {x.device}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
        if tuple(x.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")


def check_grid(
    query: Tensor, key: Tensor, offset_encoding: Tensor | None, elements: int, window: Window, dropout: float,
    mask: Tensor | None, key_mask: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the window fits the image, ``offset_encoding`` fits the window and the number of output
    elements, and ``dropout`` and the masks are valid."""
    if not isinstance(window, Window):
        raise ValueError(f"window must be a tg_equiattn.grids.Window, got {type(window).__name__}")
    window.check(query.shape[4:])
    checks.probability(dropout=dropout)
    checks.pixel_mask(mask, query.shape[0], query.shape[4:], query.device)
    if key_mask is not None:
        if not window.is_global:
            raise ValueError(
                "key_mask must be None unless the window is global (kernel_size=None), got a mask; pass mask, which "
                "masks queries and keys"
            )
        checks.pixel_mask(key_mask, key.shape[0], key.shape[4:], key.device, "key_mask")
    if offset_encoding is None:
        if not window.is_global:
            raise ValueError(
                "offset_encoding must be given for a window, got None; use a global window (kernel_size=None) for "
                "attention without positions"
            )
        return
    shape, expected = tuple(offset_encoding.shape), window.count(query.shape[4:])
    check_tensors(query, offset_encoding=(offset_encoding, shape))
    if offset_encoding.ndim not in (3, 4) or shape[0] != elements or shape[-1] != query.shape[2]:
        raise ValueError(
            f"offset_encoding must have shape ({elements}, D, {query.shape[2]}), or ({elements}, D, |H|, "
            f"{query.shape[2]}) with a full encoding, got {shape}"
        )
    if shape[1] != expected:
        raise ValueError(f"offset_encoding must have {expected} offsets on axis 1 for {window}, got {shape[1]}")


def check_group_attention(
    query, key, value, offset_encoding, element_encoding, index, window, space_bias, group_bias, dropout, mask,
    key_mask=None,
) -> None:  # fmt: skip
    """Raise ValueError unless the operands of :func:`group_attention` fit each other."""
    check_features(query, key, value, _other_pixels(window, offset_encoding, space_bias))
    elements, channels = query.shape[3], query.shape[2]
    if index.device != query.device:
        raise ValueError(f"index must be on {query.device} as query is, got {index.device}")
    outputs = len(index)
    if index.dtype != torch.int64 or tuple(index.shape) not in ((outputs, elements, elements), (elements, elements)):
        raise ValueError(
            f"index must be int64 of shape (|H|, {elements}, {elements}) or ({elements}, {elements}), "
            f"got {index.dtype} of shape {tuple(index.shape)}"
        )
    _check_permutations(index)
    check_grid(query, key, offset_encoding, outputs, window, dropout, mask, key_mask)
    full = offset_encoding is not None and offset_encoding.ndim == 4
    if full and (offset_encoding.shape[2] != elements or element_encoding is not None):
        raise ValueError(
            f"offset_encoding with 4 axes (a full encoding) must have {elements} elements on axis 2, and needs "
            f"element_encoding=None, got {tuple(offset_encoding.shape)} and "
            f"{None if element_encoding is None else tuple(element_encoding.shape)}"
        )
    if offset_encoding is not None and not full and element_encoding is None:
        raise ValueError(f"element_encoding must have shape ({elements}, {channels}), got None")
    heads = query.shape[1]
    check_tensors(
        query, element_encoding=(element_encoding, (elements, channels)), group_bias=(group_bias, (heads, elements)),
        space_bias=(space_bias, (heads, outputs, window.count(query.shape[4:]))),
    )  # fmt: skip


def check_frame_attention(query, key, value, offset_encoding, window, space_bias, dropout, mask, key_mask=None) -> None:
    """Raise ValueError unless the operands of :func:`frame_attention` fit each other."""
    check_features(query, key, value, _other_pixels(window, offset_encoding, space_bias))
    elements = len(offset_encoding) if query.shape[3] == 1 and offset_encoding is not None else query.shape[3]
    check_grid(query, key, offset_encoding, elements, window, dropout, mask, key_mask)
    if offset_encoding is not None and offset_encoding.ndim != 3:
        raise ValueError(
            f"offset_encoding must have shape ({elements}, D, {query.shape[2]}), got {tuple(offset_encoding.shape)}"
        )
    offsets = window.count(query.shape[4:])
    check_tensors(query, space_bias=(space_bias, (query.shape[1], elements, offsets)))


@checks.of_values
def _check_permutations(index: Int[Tensor, "... elements"]) -> None:
    """Raise ValueError unless each row of ``index`` is a permutation of the group elements."""
    permutation = torch.arange(index.shape[-1])
    if not torch.equal(index.sort(-1).values, permutation.expand_as(index)):
        wanted = f"a permutation of 0 ... {index.shape[-1] - 1} along its last axis"
        raise ValueError(f"index must be {wanted}, got other values; make it with relation_index")
