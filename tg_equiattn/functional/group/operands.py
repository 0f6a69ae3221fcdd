"""What operands of attention on grids must be: each error names the argument, what came and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...grids import Neighbourhood


def check_features(query: Tensor, key: Tensor, value: Tensor, other_pixels: bool = False) -> None:
    """ValueError unless they are ``(B, heads, channels, elements, *spatial)`` of one kind, and of one image unless keys
    and values may have ``other_pixels``."""
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
            f"key must have the shape of query, {tuple(query.shape)}, got {tuple(key.shape)}; its image may have "
            "another size where all pixels are keys (kernel_size=None) and nothing depends on offsets (rho_space=None)"
        )
    if value.shape[:2] != key.shape[:2] or value.shape[3:] != key.shape[3:]:
        raise ValueError(f"value must match key, {tuple(key.shape)}, but for channels, got {tuple(value.shape)}")
    if min(key.shape[4:]) < 1:
        raise ValueError(f"key must have at least one pixel on every spatial axis, got {tuple(key.shape)}")


def _other_pixels(neighbourhood: Neighbourhood, *encodings: Tensor | None) -> bool:
    """True if keys may be pixels of another image: all of them are keys, and nothing depends on offsets."""
    return (
        isinstance(neighbourhood, Neighbourhood)
        and neighbourhood.is_global
        and not any(x is not None for x in encodings)
    )


def check_tensors(query: Tensor, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """ValueError unless tensors are None, or floating point on the device of the queries, of the shapes beside them."""
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
    query: Tensor, key: Tensor, rho_space: Tensor | None, elements: int, neighbourhood: Neighbourhood, dropout: float,
    mask: Tensor | None, key_mask: Tensor | None,
) -> None:  # fmt: skip
    """ValueError unless encodings of offsets, of as many output elements, are those of a neighbourhood on the grid of
    the queries, and a rate of dropout and masks fit."""
    if not isinstance(neighbourhood, Neighbourhood):
        raise ValueError(f"neighbourhood must be a tg_equiattn.grids.Neighbourhood, got {type(neighbourhood).__name__}")
    neighbourhood.check(query.shape[4:])
    checks.probability(dropout=dropout)
    checks.pixel_mask(mask, query.shape[0], query.shape[4:], query.device)
    if key_mask is not None:
        if not neighbourhood.is_global:
            raise ValueError("key_mask must be None within windows, where mask is that of queries and of keys")
        checks.pixel_mask(key_mask, key.shape[0], key.shape[4:], key.device, "key_mask")
    if rho_space is None:
        if not neighbourhood.is_global:
            raise ValueError("rho_space must be given for a window, got None: only kernel_size=None goes without")
        return
    shape, expected = tuple(rho_space.shape), neighbourhood.count(query.shape[4:])
    check_tensors(query, rho_space=(rho_space, shape))
    if rho_space.ndim not in (3, 4) or shape[0] != elements or shape[-1] != query.shape[2]:
        raise ValueError(
            f"rho_space must have shape ({elements}, D, {query.shape[2]}), or one more axis, of u, in third place, "
            f"got {shape}"
        )
    if shape[1] != expected:
        raise ValueError(f"rho_space must have {expected} offsets on axis 1 for {neighbourhood}, got {shape[1]}")


def check_group_attention(
    query, key, value, rho_space, rho_group, index, neighbourhood, space_bias, group_bias, dropout, mask, key_mask=None
) -> None:
    """ValueError for operands of :func:`group_attention` that do not fit."""
    check_features(query, key, value, _other_pixels(neighbourhood, rho_space, space_bias))
    elements, channels = query.shape[3], query.shape[2]
    if index.device != query.device:
        raise ValueError(f"index must be on {query.device} as query is, got {index.device}")
    outputs = len(index)
    if index.dtype != torch.int64 or tuple(index.shape) not in ((outputs, elements, elements), (elements, elements)):
        raise ValueError(
            f"index must be int64 of shape (|H|, {elements}, {elements}) or ({elements}, {elements}), "
            f"got {index.dtype} of shape {tuple(index.shape)}"
        )
    permutation = torch.arange(elements, device=index.device)
    if checks.values_are_free(index) and not torch.equal(index.sort(-1).values, permutation.expand_as(index)):
        raise ValueError(f"index must be a permutation of 0 ... {elements - 1} along its last axis, got other values")
    check_grid(query, key, rho_space, outputs, neighbourhood, dropout, mask, key_mask)
    full = rho_space is not None and rho_space.ndim == 4
    if full and (rho_space.shape[2] != elements or rho_group is not None):
        raise ValueError(
            f"rho_space must have {elements} elements on axis 2, and rho_group be None, with a full encoding; "
            f"got {tuple(rho_space.shape)}"
        )
    if rho_space is not None and not full and rho_group is None:
        raise ValueError(f"rho_group must have shape ({elements}, {channels}), got None")
    heads = query.shape[1]
    check_tensors(
        query, rho_group=(rho_group, (elements, channels)), group_bias=(group_bias, (heads, elements)),
        space_bias=(space_bias, (heads, outputs, neighbourhood.count(query.shape[4:]))),
    )  # fmt: skip


def check_frame_attention(
    query, key, value, rho_space, neighbourhood, space_bias, dropout, mask, key_mask=None
) -> None:
    """ValueError for operands of :func:`frame_attention` that do not fit."""
    check_features(query, key, value, _other_pixels(neighbourhood, rho_space, space_bias))
    elements = len(rho_space) if query.shape[3] == 1 and rho_space is not None else query.shape[3]
    check_grid(query, key, rho_space, elements, neighbourhood, dropout, mask, key_mask)
    if rho_space is not None and rho_space.ndim != 3:
        raise ValueError(f"rho_space must have shape ({elements}, D, {query.shape[2]}), got {tuple(rho_space.shape)}")
    offsets = neighbourhood.count(query.shape[4:])
    check_tensors(query, space_bias=(space_bias, (query.shape[1], elements, offsets)))
