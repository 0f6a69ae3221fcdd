"""Group self-attention over scales.

A dilated window of an image is an ordinary window of one of its phases, the images of pixels ``step`` apart. Attention
runs for each pair of scales, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...merging import merge_attentions
from ...modes import full_precision
from .attention import group_attention_impl

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def phases(x: Tensor, step: int, dim: int) -> Tensor:
    """Split images into phases of pixels ``step`` apart along every axis, padded with zeros to equal sizes:
    (B, ..., *spatial) -> (B step^dim, ..., *ceil(spatial / step))."""
    first, sides = x.ndim - dim, x.shape[x.ndim - dim :]
    counts = [(side + step - 1) // step for side in sides]
    padding = [(0, count * step - side) for side, count in zip(sides, counts, strict=True)]
    x = F.pad(x, [n for both in reversed(padding) for n in both])
    for number, count in enumerate(counts):
        axis = first + 2 * number  # each axis that was split has added one axis in front
        x = x.unflatten(axis, (count, step)).movedim(axis + 1, number + 1)
    return x.flatten(0, dim)


def from_phases(x: Tensor, step: int, batch: int, spatial: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`phases`: join phases to images (batch, ..., *spatial)."""
    dim = len(spatial)
    x = x.unflatten(0, (batch, *[step] * dim))
    for number in reversed(range(dim)):
        axis = x.ndim - dim + number  # the pixels of a phase; axes of phases that are not joined yet come first
        x = x.movedim(number + 1, axis).flatten(axis - 1, axis)
    for axis, side in enumerate(spatial, start=x.ndim - dim):
        # with symbolic sizes torch would have to guard on whether a view is contiguous
        if torch.compiler.is_compiling():
            x = x.index_select(axis, torch.arange(side, device=x.device))
        else:
            x = x.narrow(axis, 0, side)
    return x


def dilation_attention_impl(
    query, key, value, offset_encoding: Float[Tensor, "M D C"],
    element_encoding: Float[Tensor, "U C"] | None, index: Int[Tensor, "M M"] | None, scales, scale_window, window,
    space_bias: Float[Tensor, "heads M D"] | None = None, group_bias: Float[Tensor, "heads U"] | None = None,
    dropout=0.0, key_mask=None, plain=False,
) -> Tensor:  # fmt: skip
    r"""Lifting and group attention on a dilation group, without checks. Operands must be finite at masked pixels;
    outputs are not masked. Queries without a key that is valid in ``key_mask`` have the output zero.

    H is the product of scales :math:`2^j` and a finite group M with elements m and n:

    .. math::
        \mathrm{out}(i, j, m) = \sum_{D, l, n} \mathrm{softmax}_{D, l, n}\big(c\, \langle q(i, j, m),\;
        k(i + 2^j D, l, n) + \rho(m^{-1} D, (l - j, m^{-1} n)) \rangle + b\big)\; v(i + 2^j D, l, n)

    The sum runs over the offsets D of the window and the scales l in ``scale_window`` around j. Operands are those of
    :func:`group_attention`, except for these shapes:

    - query, key and value have ``|H|`` elements, or one for lifting
    - offset_encoding is the same at all scales
    - U = ``scale_window`` |M|, scales first; U = 1 for lifting
    - index is that of relation "relative"; ``None`` for lifting
    """
    lifts = index is None
    batch, spatial, elements = query.shape[0], tuple(query.shape[4:]), len(offset_encoding)

    def of_scale(x: Tensor, axis: int, number: int) -> Tensor:
        """The elements of one scale; lifting has one element for all scales."""
        return x if lifts else x.narrow(axis, number * elements, elements)

    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(scales)]
    near = 1 if lifts else scale_window
    for number, offset in itertools.product(range(scales), range(near)):  # query scale, and key scale in its window
        other = number + offset - near // 2
        if not 0 <= other < scales:
            continue
        step = 2**number
        operands = of_scale(query, 3, number), of_scale(key, 3, other), of_scale(value, 3, other)
        q, k, v = (phases(x, step, len(spatial)) for x in operands)
        out, lse = group_attention_impl(
            q, k, v, offset_encoding,
            None if element_encoding is None else of_scale(element_encoding, 0, offset), index, window, space_bias,
            None if group_bias is None else of_scale(group_bias, 1, offset), dropout,
            _valid_phases(key_mask, step, batch, spatial, query.device), plain,
        )  # fmt: skip
        outs, lses = found[number]
        outs.append(from_phases(out, step, batch, spatial))
        lses.append(from_phases(lse, step, batch, spatial))
    with full_precision(query.device):
        merged = [merge_attentions(torch.stack(outs), torch.stack(lses).unsqueeze(3))[0] for outs, lses in found]
    return torch.cat(merged, 3).to(value.dtype)


def _valid_phases(
    mask: Tensor | None, step: int, batch: int, spatial: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """The mask of :func:`phases`, or None if all their pixels are valid."""
    if mask is None:
        if step == 1 or (not torch.compiler.is_compiling() and all(side % step == 0 for side in spatial)):
            return None
        mask = torch.ones((1, *spatial), dtype=torch.bool, device=device)
    return phases(mask.expand(batch, *spatial).to(torch.uint8), step, len(spatial)).bool()
