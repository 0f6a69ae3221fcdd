"""What operands of attention on grids must be: each error names the argument, what came and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...grids import Neighbourhood


def check_features(query: Tensor, key: Tensor, value: Tensor) -> None:
    """ValueError unless they are ``(B, heads, channels, elements, *spatial)`` of one kind."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (6, 7):
            raise ValueError(f"{name} must have shape (B, heads, C, |H|, *spatial), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
        if x.device != query.device or x.dtype != query.dtype:
            raise ValueError(f"{name} must be {query.dtype} on {query.device} as query is, got {x.dtype} on {x.device}")
    if key.shape != query.shape:
        raise ValueError(f"key must have the shape of query, {tuple(query.shape)}, got {tuple(key.shape)}")
    if value.shape[:2] != query.shape[:2] or value.shape[3:] != query.shape[3:]:
        raise ValueError(f"value must match query, {tuple(query.shape)}, but for channels, got {tuple(value.shape)}")


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
    query: Tensor, rho_space: Tensor, elements: int, neighbourhood: Neighbourhood, dropout: float, mask: Tensor | None
) -> None:
    """ValueError unless encodings of offsets, of as many output elements, are those of a neighbourhood on the grid of
    the queries, and a rate of dropout and a mask fit."""
    if not isinstance(neighbourhood, Neighbourhood):
        raise ValueError(f"neighbourhood must be a tg_equiattn.grids.Neighbourhood, got {type(neighbourhood).__name__}")
    neighbourhood.check(query.shape[4:])
    shape, expected = tuple(rho_space.shape), neighbourhood.count(query.shape[4:])
    check_tensors(query, rho_space=(rho_space, shape))
    if rho_space.ndim not in (3, 4) or shape[0] != elements or shape[-1] != query.shape[2]:
        raise ValueError(
            f"rho_space must have shape ({elements}, D, {query.shape[2]}), or one more axis, of u, in third place, "
            f"got {shape}"
        )
    if shape[1] != expected:
        raise ValueError(f"rho_space must have {expected} offsets on axis 1 for {neighbourhood}, got {shape[1]}")
    checks.probability(dropout=dropout)
    checks.pixel_mask(mask, query.shape[0], query.shape[4:], query.device)


def check_group_attention(
    query, key, value, rho_space, rho_group, index, neighbourhood, space_bias, group_bias, dropout, mask
) -> None:
    """ValueError for operands of :func:`group_attention` that do not fit."""
    check_features(query, key, value)
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
    check_grid(query, rho_space, outputs, neighbourhood, dropout, mask)
    if rho_space.ndim == 4 and (rho_space.shape[2] != elements or rho_group is not None):
        raise ValueError(
            f"rho_space must have {elements} elements on axis 2, and rho_group be None, with a full encoding; "
            f"got {tuple(rho_space.shape)}"
        )
    if rho_space.ndim == 3 and rho_group is None:
        raise ValueError(f"rho_group must have shape ({elements}, {channels}), got None")
    heads = query.shape[1]
    check_tensors(
        query, rho_group=(rho_group, (elements, channels)), group_bias=(group_bias, (heads, elements)),
        space_bias=(space_bias, (heads, outputs, rho_space.shape[1])),
    )  # fmt: skip


def check_frame_attention(query, key, value, rho_space, neighbourhood, space_bias, dropout, mask) -> None:
    """ValueError for operands of :func:`frame_attention` that do not fit."""
    check_features(query, key, value)
    elements = len(rho_space) if query.shape[3] == 1 else query.shape[3]
    check_grid(query, rho_space, elements, neighbourhood, dropout, mask)
    if rho_space.ndim != 3:
        raise ValueError(f"rho_space must have shape ({elements}, D, {query.shape[2]}), got {tuple(rho_space.shape)}")
    check_tensors(query, space_bias=(space_bias, (query.shape[1], elements, rho_space.shape[1])))
