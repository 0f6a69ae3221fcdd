"""What operands of group self-attention must be: each error names the argument, what came and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...grids import Neighbourhood


def check_group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rho_space: Tensor,
    rho_group: Tensor | None,
    index: Tensor,
    neighbourhood: Neighbourhood,
    space_bias: Tensor | None,
    group_bias: Tensor | None,
    scale: float | None,
    dropout: float,
    mask: Tensor | None,
) -> None:
    """ValueError for operands of :func:`group_attention` that do not fit."""
    _check_operands(query, key, value)
    _check_encoding(query, rho_space, rho_group, index)
    _check_biases(query, rho_space, index, space_bias, group_bias)
    if not isinstance(neighbourhood, Neighbourhood):
        raise ValueError(f"neighbourhood must be a tg_equiattn.grids.Neighbourhood, got {type(neighbourhood).__name__}")
    neighbourhood.check(query.shape[4:])
    expected = neighbourhood.count(query.shape[4:])
    if rho_space.shape[1] != expected:
        raise ValueError(
            f"rho_space must have {expected} offsets on axis 1 for {neighbourhood}, got {rho_space.shape[1]}"
        )
    checks.probability(dropout=dropout)
    checks.scale(scale)
    checks.pixel_mask(mask, query.shape[0], query.shape[4:], query.device)


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
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


def _check_encoding(query: Tensor, rho_space: Tensor, rho_group: Tensor | None, index: Tensor) -> None:
    elements, channels = query.shape[3], query.shape[2]
    for name, x in (("rho_space", rho_space), ("rho_group", rho_group), ("index", index)):
        if x is not None and x.device != query.device:
            raise ValueError(f"{name} must be on {query.device} as query is, got {x.device}")
        if x is not None and x is not index and not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
    outputs = len(index)
    if index.dtype != torch.int64 or tuple(index.shape) not in ((outputs, elements, elements), (elements, elements)):
        raise ValueError(
            f"index must be int64 of shape (|H|, {elements}, {elements}) or ({elements}, {elements}), "
            f"got {index.dtype} of shape {tuple(index.shape)}"
        )
    permutation = torch.arange(elements, device=index.device)
    if checks.values_are_free(index) and not torch.equal(index.sort(-1).values, permutation.expand_as(index)):
        raise ValueError(f"index must be a permutation of 0 ... {elements - 1} along its last axis, got other values")
    if rho_space.ndim not in (3, 4) or rho_space.shape[0] != outputs or rho_space.shape[-1] != channels:
        raise ValueError(
            f"rho_space must have shape ({outputs}, D, {channels}) or ({outputs}, D, {elements}, {channels}), "
            f"got {tuple(rho_space.shape)}"
        )
    if rho_space.ndim == 4 and (rho_space.shape[2] != elements or rho_group is not None):
        raise ValueError(
            f"rho_space must have {elements} elements on axis 2, and rho_group be None, with a full encoding; "
            f"got {tuple(rho_space.shape)}"
        )
    if rho_space.ndim == 3 and (rho_group is None or tuple(rho_group.shape) != (elements, channels)):
        got = None if rho_group is None else tuple(rho_group.shape)
        raise ValueError(f"rho_group must have shape ({elements}, {channels}), got {got}")


def _check_biases(
    query: Tensor, rho_space: Tensor, index: Tensor, space_bias: Tensor | None, group_bias: Tensor | None
) -> None:
    heads, elements = query.shape[1], query.shape[3]
    expected = {"space_bias": (heads, len(index), rho_space.shape[1]), "group_bias": (heads, elements)}
    for name, x in (("space_bias", space_bias), ("group_bias", group_bias)):
        if x is None:
            continue
        if x.device != query.device:
            raise ValueError(f"{name} must be on {query.device} as query is, got {x.device}")
        if not x.is_floating_point() or tuple(x.shape) != expected[name]:
            raise ValueError(
                f"{name} must be floating point of shape {expected[name]}, got {x.dtype} of shape {tuple(x.shape)}"
            )
