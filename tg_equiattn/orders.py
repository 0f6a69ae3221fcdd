"""Orders of the tokens of sequences: by their distance to the centroid, or as given."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .sequences import Sequences, _inverse

ORDERS = ("input", "radial")


@torch.no_grad()
def radial_order(pos: Tensor, sequences: Sequences, scalars: Tensor | None = None) -> Tensor:
    r"""Tokens of each sequence by their distance to its centroid, nearest first: an order that rotations, reflections,
    translations and permutations of the tokens leave alone.

    Distances that agree within rounding are told apart by further invariants, one after the other:
    :math:`x_i \cdot \sum_j |x_j|^2 x_j`, :math:`x_i \cdot \sum_j x_j x_j^\top x_i`, and a fixed combination of the
    token's scalars. **Tokens that agree in all of them stay as they came**: those do that a symmetry of the cloud
    exchanges, so relabelling the points of a ring or a lattice changes their order, and only of clouds without such
    ties is the order independent of that of the tokens. Rotations, reflections and translations leave it alone in any
    cloud.

    "Within rounding" means that no two neighbors among the sorted distances are further apart than 1e-6 of the cloud's
    radius for float32, 1e-12 for float64, or what rounding of the positions themselves makes of them far from the
    origin; scalars agree within 1e-5 and 1e-10. In float32 clouds of many thousand tokens distances come that close by
    chance: there give positions in float64, which features need not be.

    The order jumps where two tokens exchange distances. No derivative sees that.

    Args:
        pos: ``(3, T)``.
        sequences: which tokens belong together.
        scalars: ``(S, T)`` invariant features.

    Returns:
        ``order``, int64 ``(T,)``: token ``order[p]`` comes at place p. Padding stays at the end of its sequence.
    """
    raw = sequences.zero_padding(pos.double())
    x = sequences.zero_padding(sequences.centred(raw))
    batch, rounding = sequences.batch, torch.finfo(pos.dtype).eps
    square = x.square().sum(0)
    radius, reach = (_largest(y, sequences)[batch] for y in (square.sqrt(), raw.square().sum(0).sqrt()))
    skew = sequences.mean(square * x)[:, batch]
    spread = sequences.mean((x[:, None] * x[None]).flatten(0, 1))[:, batch].unflatten(0, (3, 3))
    # each with what it is divided by: radii that are off by a part in n make fourth powers off by four
    keys = [
        (square.sqrt(), radius),
        ((x * skew).sum(0), 4 * radius**4),
        ((x * (spread * x).sum(1)).sum(0), 4 * radius**4),
    ]
    tolerances = 3 * [(8 * rounding * reach / radius).clamp(min=max(1e-12, 8 * rounding))]
    if scalars is not None and scalars.shape[0]:
        mixture = torch.arange(1, scalars.shape[0] + 1, device=x.device, dtype=x.dtype).sqrt()[:, None]
        size = _largest((mixture * scalars.double().abs()).sum(0), sequences)[batch]
        keys.append(((mixture * scalars.double()).sum(0), size))
        tolerances.append(torch.full_like(radius, max(1e-10, 80 * torch.finfo(scalars.dtype).eps)))
    group = 2 * batch if sequences.mask is None else 2 * batch + (~sequences.mask).long()
    for (key, size), tolerance in zip(keys, tolerances, strict=True):
        key = torch.where(size > 0, key / size, 0.0)
        order = key.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        apart = (key[order].diff() > tolerance[order][1:]) | (group[order].diff() != 0)
        group = torch.cat([apart.new_zeros(1), apart]).cumsum(0)[_inverse(order)]
    return group.argsort(stable=True)  # ties as they came: what rounding made of their keys is forgotten


def _largest(x: Tensor, sequences: Sequences) -> Tensor:
    """The largest of numbers (T,) that are not negative in each sequence, (B,)."""
    return x.new_zeros(sequences.count).scatter_reduce(0, sequences.batch, x, "amax")


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
