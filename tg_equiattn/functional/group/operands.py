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
    _check_biases(query, rho_space, len(index), space_bias, group_bias)
    _check_rest(query, rho_space, neighbourhood, scale, dropout, mask)


def check_frame_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rho_space: Tensor,
    neighbourhood: Neighbourhood,
    space_bias: Tensor | None,
    scale: float | None,
    dropout: float,
    mask: Tensor | None,
) -> None:
    """ValueError for operands of :func:`frame_attention` that do not fit."""
    _check_operands(query, key, value)
    _check_tensors(query, rho_space=rho_space)
    elements, channels = query.shape[3], query.shape[2]
    if rho_space.ndim != 3 or elements not in (1, rho_space.shape[0]) or rho_space.shape[-1] != channels:
        first = "|H|" if elements == 1 else elements
        raise ValueError(f"rho_space must have shape ({first}, D, {channels}), got {tuple(rho_space.shape)}")
    _check_biases(query, rho_space, rho_space.shape[0], space_bias, None)
    _check_rest(query, rho_space, neighbourhood, scale, dropout, mask)


def check_separable(value: Tensor, space_bias: Tensor, neighbourhood: Neighbourhood, mask: Tensor | None) -> None:
    """ValueError for operands of :func:`separable_group_convolution` that do not fit."""
    _check_operands(value, value, value)
    _check_tensors(value, space_bias=space_bias)
    _check_neighbourhood(value, neighbourhood)
    expected = (value.shape[1], value.shape[3], neighbourhood.count(value.shape[4:]))
    if tuple(space_bias.shape) != expected:
        raise ValueError(f"space_bias must have shape {expected} for {neighbourhood}, got {tuple(space_bias.shape)}")
    checks.pixel_mask(mask, value.shape[0], value.shape[4:], value.device)


def _check_rest(
    query: Tensor,
    rho_space: Tensor,
    neighbourhood: Neighbourhood,
    scale: float | None,
    dropout: float,
    mask: Tensor | None,
) -> None:
    _check_neighbourhood(query, neighbourhood)
    expected = neighbourhood.count(query.shape[4:])
    if rho_space.shape[1] != expected:
        raise ValueError(
            f"rho_space must have {expected} offsets on axis 1 for {neighbourhood}, got {rho_space.shape[1]}"
        )
    checks.probability(dropout=dropout)
    checks.scale(scale)
    checks.pixel_mask(mask, query.shape[0], query.shape[4:], query.device)


def _check_neighbourhood(x: Tensor, neighbourhood: Neighbourhood) -> None:
    if not isinstance(neighbourhood, Neighbourhood):
        raise ValueError(f"neighbourhood must be a tg_equiattn.grids.Neighbourhood, got {type(neighbourhood).__name__}")
    neighbourhood.check(x.shape[4:])


def _check_tensors(query: Tensor, **tensors: Tensor | None) -> None:
    """Floating point on the device of the queries."""
    for name, x in tensors.items():
        if x is not None and x.device != query.device:
            raise ValueError(f"{name} must be on {query.device} as query is, got {x.device}")
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")


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
    _check_tensors(query, rho_space=rho_space, rho_group=rho_group)
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
    query: Tensor, rho_space: Tensor, outputs: int, space_bias: Tensor | None, group_bias: Tensor | None
) -> None:
    heads, elements = query.shape[1], query.shape[3]
    expected = {"space_bias": (heads, outputs, rho_space.shape[1]), "group_bias": (heads, elements)}
    _check_tensors(query, space_bias=space_bias, group_bias=group_bias)
    for name, x in (("space_bias", space_bias), ("group_bias", group_bias)):
        if x is not None and tuple(x.shape) != expected[name]:
            raise ValueError(f"{name} must have shape {expected[name]}, got {tuple(x.shape)}")
