"""Checks of the operands of attention on grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks
from ...grids import Window

if TYPE_CHECKING:
    from jaxtyping import Int


def _check_tensors(query: Tensor, /, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
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


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, offset_encoding: Tensor | None, element_encoding: Tensor | None,
    index: Tensor | None, window: Window, space_bias: Tensor | None, group_bias: Tensor | None, dropout: float,
    mask: Tensor | None, key_mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ValueError unless the operands of :func:`.group_attention` fit each other."""
    if not isinstance(window, Window):
        raise ValueError(f"window must be a tg_equiattn.grids.Window, got {type(window).__name__}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (6, 7):
            raise ValueError(f"{name} must have shape (B, heads, C, |H|, *spatial), got {tuple(x.shape)}")
    other_pixels = window.is_global and offset_encoding is None and space_bias is None
    if key.shape[4:] != query.shape[4:] and not other_pixels:
        raise ValueError(
            f"key must have the pixels of query, {tuple(query.shape)}, got {tuple(key.shape)}; for keys from an image "
            "of another size, use a global window (kernel_size=None) with offset_encoding=None and space_bias=None"
        )
    if min(key.shape[4:]) < 1:
        raise ValueError(f"key must have at least one pixel on every spatial axis, got {tuple(key.shape)}")
    shapes = (*query.shape[:4], *key.shape[4:]), (*key.shape[:2], value.shape[2], *key.shape[3:])
    _check_tensors(query, query=(query, tuple(query.shape)), key=(key, shapes[0]), value=(value, shapes[1]))
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(f"{name} must be {query.dtype} as query is, got {x.dtype}")
    heads, channels, elements = query.shape[1:4]
    lifts = index is None and elements == 1 and offset_encoding is not None
    outputs = len(offset_encoding) if lifts and offset_encoding is not None else elements
    if index is not None:
        outputs = len(index)
        _check_index(index, query)
    elif element_encoding is not None or group_bias is not None:
        raise ValueError(
            "index must be given with element_encoding or group_bias, got None; make it with relation_index, or leave "
            "both out for relation 'frame'"
        )
    window.check(query.shape[4:])
    checks.probability(dropout=dropout)
    checks.pixel_mask(mask, query.shape[0], query.shape[4:], query.device)
    checks.pixel_mask(key_mask, key.shape[0], key.shape[4:], key.device, "key_mask")
    if offset_encoding is None:
        if not window.is_global:
            raise ValueError(
                "offset_encoding must be given for a window, got None; use a global window (kernel_size=None) for "
                "attention without positions"
            )
    else:
        _check_tensors(query, offset_encoding=(offset_encoding, (outputs, window.count(query.shape[4:]), channels)))
        if index is not None and element_encoding is None:
            raise ValueError(f"element_encoding must have shape ({elements}, {channels}), got None")
    _check_tensors(
        query, element_encoding=(element_encoding, (elements, channels)), group_bias=(group_bias, (heads, elements)),
        space_bias=(space_bias, (heads, outputs, window.count(query.shape[4:]))),
    )  # fmt: skip


def _check_index(index: Tensor, query: Tensor) -> None:
    elements = query.shape[3]
    if index.device != query.device:
        raise ValueError(f"index must be on {query.device} as query is, got {index.device}")
    shapes = (len(index), elements, elements), (elements, elements)
    if index.dtype != torch.int64 or tuple(index.shape) not in shapes:
        raise ValueError(
            f"index must be int64 of shape (|H|, {elements}, {elements}) or ({elements}, {elements}), "
            f"got {index.dtype} of shape {tuple(index.shape)}"
        )
    _check_permutations(index)


@checks.of_values
def _check_permutations(index: Int[Tensor, "... elements"]) -> None:
    """Raise ValueError unless each row of ``index`` is a permutation of the group elements."""
    permutation = torch.arange(index.shape[-1])
    if not torch.equal(index.sort(-1).values, permutation.expand_as(index)):
        wanted = f"a permutation of 0 ... {index.shape[-1] - 1} along its last axis"
        raise ValueError(f"index must be {wanted}, got other values; make it with relation_index")
