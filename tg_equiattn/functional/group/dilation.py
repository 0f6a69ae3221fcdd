"""Group self-attention over scales: a dilated window of an image is an ordinary window of its phases, pixels ``step``
apart; scales are attended to one at a time and join by the logarithms of their normalisers."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import full_precision
from .attention import checked_group_attention
from .masks import zero_where_hidden


def phases(x: Tensor, step: int, dim: int) -> Tensor:
    """(B, ..., *spatial) as (B step^dim, ..., *ceil(spatial / step)): pixels ``step`` apart along every axis, with
    zeros where there are none."""
    first, sides = x.ndim - dim, x.shape[x.ndim - dim :]
    counts = [(side + step - 1) // step for side in sides]
    missing = [(0, count * step - side) for side, count in zip(sides, counts, strict=True)]
    x = F.pad(x, [n for both in reversed(missing) for n in both])
    for number, count in enumerate(counts):
        axis = first + 2 * number  # every axis split has left one more before those that follow
        x = x.unflatten(axis, (count, step)).movedim(axis + 1, number + 1)
    return x.flatten(0, dim)


def from_phases(x: Tensor, step: int, batch: int, spatial: tuple[int, ...]) -> Tensor:
    """What :func:`phases` makes of an image of these sides, put together again."""
    dim = len(spatial)
    x = x.unflatten(0, (batch, *[step] * dim))
    for number in reversed(range(dim)):
        axis = x.ndim - dim + number  # of the pixels of this phase; those before are as yet split
        x = x.movedim(number + 1, axis).flatten(axis - 1, axis)
    for axis, side in enumerate(spatial, start=x.ndim - dim):
        # what is left of a view would ask in programs for all sizes whether it is contiguous
        x = x.index_select(axis, torch.arange(side, device=x.device)) if _for_all_sizes() else x.narrow(axis, 0, side)
    return x


def _for_all_sizes() -> bool:
    """Whether one program is made for images of all sizes."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def checked_dilation_attention(
    query, key, value, rho_space, rho_group, index, scales, scale_window, neighbourhood, space_bias=None,
    group_bias=None, dropout=0.0, mask=None, plain=False,
) -> Tensor:  # fmt: skip
    r"""Lifting and group attention on a dilation group, of operands that are known to fit and to hold numbers.

    With H the product of scales :math:`2^j` and a finite group M of which m and n are elements,

    .. math::
        \mathrm{out}(i, j, m) = \sum_{D, l, n} \mathrm{softmax}_{D, l, n}\big(c\, \langle q(i, j, m),\;
        k(i + 2^j D, l, n) + \rho(m^{-1} D, (l - j, m^{-1} n)) \rangle + b\big)\; v(i + 2^j D, l, n)

    over offsets D of the window and scales l in ``scale_window`` around j. As :func:`group_attention`, but query, key
    and value may have one element in place of ``|H|`` (lifting); rho_space, the same at all scales, is ``(|M|, D, C)``
    or full ``(|M|, D, U, C)``; rho_group ``(U, C)``, U = ``scale_window`` |M|, scales first, or 1 (lifting); index
    ``(|M|, |M|)`` of relation "relative" or ``(|M|, 1, 1)`` (lifting); biases ``(heads, |M|, D)`` and ``(heads, U)``.
    """
    lifts = index.ndim == 3
    batch, spatial, elements = query.shape[0], tuple(query.shape[4:]), index.shape[-1]

    def part(x: Tensor, axis: int, number: int) -> Tensor:
        """What is of one scale; with lifting everything is."""
        return x if lifts else x.narrow(axis, number * elements, elements)

    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(scales)]
    near = 1 if lifts else scale_window
    for number, place in itertools.product(range(scales), range(near)):  # of queries, and of the key's in the window
        other = number + place - near // 2
        if not 0 <= other < scales:
            continue
        step = 2**number
        operands = part(query, 3, number), part(key, 3, other), part(value, 3, other)
        q, k, v = (phases(x, step, len(spatial)) for x in operands)
        out, level = checked_group_attention(
            q, k, v, part(rho_space, 2, place) if rho_space.ndim == 4 else rho_space,
            None if rho_group is None else part(rho_group, 0, place), index, neighbourhood, space_bias,
            None if group_bias is None else part(group_bias, 1, place), dropout,
            _phases_there(mask, step, batch, spatial, query.device), plain,
        )  # fmt: skip
        level = level if lifts else from_phases(level, step, batch, spatial)
        parts[number].append((from_phases(out, step, batch, spatial), level))
    return zero_where_hidden(torch.cat([_joined(of_one_scale) for of_one_scale in parts], 3), mask)


def _phases_there(
    mask: Tensor | None, step: int, batch: int, spatial: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """Which pixels of phases there are; None where all are."""
    if mask is None:
        if step == 1 or (not _for_all_sizes() and all(side % step == 0 for side in spatial)):
            return None
        mask = torch.ones((1, *spatial), dtype=torch.bool, device=device)
    return phases(mask.expand(batch, *spatial).to(torch.uint8), step, len(spatial)).bool()


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Softmax averages (B, heads, C, |M|, *spatial) of several sets of keys as one over all, by their log-sum-exps."""
    if len(parts) == 1:
        return parts[0][0]
    out, level = (torch.stack(x) for x in zip(*parts, strict=True))
    with full_precision(out.device):
        return (level.softmax(0)[:, :, :, None].to(out.dtype) * out).sum(0)
