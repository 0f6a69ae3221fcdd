"""Orders of the tokens of sequences: by their distance to the centroid, or as given."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .sequences import Sequences

ORDERS = ("input", "radial")


@torch.no_grad()
def radial_order(pos: Tensor, sequences: Sequences, scalars: Tensor | None = None) -> Tensor:
    r"""Tokens of each sequence by their distance to its centroid, nearest first: an order that rotations, reflections,
    translations and permutations of the tokens leave alone.

    Distances that agree within rounding are told apart by further invariants, one after the other:
    :math:`x_i \cdot \sum_j |x_j|^2 x_j`, :math:`x_i \cdot \sum_j x_j x_j^\top x_i`, and a fixed combination of the
    token's scalars. Tokens that agree in all of them, as those do that a symmetry of the cloud exchanges, stay as they
    came. "Within rounding" means 1e-6 of the cloud's radius for float32 and 1e-12 for float64. In float32 clouds of
    many thousand tokens radii come that close, and rounding decides: there give positions in float64, which features
    need not be.

    Args:
        pos: ``(3, T)``.
        sequences: which tokens belong together.
        scalars: ``(S, T)`` invariant features.

    Returns:
        ``order``, int64 ``(T,)``: token ``order[p]`` comes at place p. Padding stays at the end of its sequence.
    """
    x = sequences.zero_padding(sequences.centred(pos.double()))
    batch, tolerance = sequences.batch, 1e-12 if pos.dtype == torch.float64 else 1e-6
    square = x.square().sum(0)
    skew = sequences.mean(square * x)[:, batch]
    spread = sequences.mean((x[:, None] * x[None]).flatten(0, 1))[:, batch].unflatten(0, (3, 3))
    keys = [square.sqrt(), (x * skew).sum(0), (x * (spread * x).sum(1)).sum(0)]
    sizes = [square.sqrt(), square.square(), square.square()]  # what a key may be rounding's alone against
    if scalars is not None and len(scalars):
        mixture = torch.arange(1, len(scalars) + 1, device=x.device, dtype=x.dtype).sqrt()
        keys.append((mixture[:, None] * scalars.double()).sum(0))
        sizes.append((mixture[:, None] * scalars.double().abs()).sum(0))
    order = torch.arange(sequences.tokens, device=x.device)
    group = 2 * batch if sequences.mask is None else 2 * batch + (~sequences.mask).long()
    for key, size in zip(keys, sizes, strict=True):
        size = key.new_zeros(sequences.count).scatter_reduce(0, batch, size, "amax")[batch]
        key = torch.where(size > 0, key / size, 0.0)
        order = order[key[order].argsort(stable=True)]
        order = order[group[order].argsort(stable=True)]
        sorted_key, sorted_group = key[order], group[order]
        new = (sorted_key.diff() > tolerance) | (sorted_group.diff() != 0)
        group = torch.empty_like(group).scatter_(0, order, torch.cat([new.new_zeros(1), new]).cumsum(0))
    return order


def check_order(order: Tensor, sequences: Sequences) -> None:
    """Raise ValueError unless order (T,) is a permutation of the tokens of every sequence."""
    if not isinstance(order, Tensor):
        raise ValueError(f"order must be a permutation as a tensor, got {order!r}")
    if order.dtype != torch.int64 or tuple(order.shape) != (sequences.tokens,):
        raise ValueError(
            f"order must be int64 with {sequences.tokens} entries, got {order.dtype} of shape {tuple(order.shape)}"
        )
    if order.device != sequences.batch.device:
        raise ValueError(f"order must be on {sequences.batch.device} as the input is, got {order.device}")
    if not checks.values_are_free(order):
        return
    whole = bool((order.sort().values == torch.arange(len(order))).all())
    if not whole or not bool((sequences.batch[order] == sequences.batch).all()):
        raise ValueError("order must be a permutation of the tokens within every sequence")
    if sequences.mask is not None and not bool((sequences.mask[order] == sequences.mask).all()):
        raise ValueError("order must keep padding at the end of every sequence")
