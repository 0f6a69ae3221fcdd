r"""Group-linear maps in the Fourier basis of a finite group.

A map :math:`M(w)[h, s] = w[h^{-1} s]` of functions on a group commutes with left multiplications. In the basis of the
real irreps it is block diagonal: an irrep of dimension d has m equal blocks d x d, with m = d for irreps of real type,
d / 2 for complex and d / 4 for quaternionic type. This takes :math:`\sum d^2 m` products instead of :math:`|H|^2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import FiniteGroup
from ..shapes import Float
from ..torch_state import by_form, cached, full_precision, is_autocast
from .encodings import relation_index

Irreps = tuple[tuple[int, int], ...]  # dimension d and multiplicity m of every irrep, the trivial one first


@cached(maxsize=32)
def _decomposition(group: FiniteGroup) -> tuple[Tensor, Irreps]:
    """The Fourier basis Q, ``(|H|, |H|)`` with coordinates in its columns, in the order (irrep, copy, d), and the
    irreps.

    Eigenspaces of a generic symmetric combination of left multiplications are the blocks. A second combination maps
    equal blocks to each other, which aligns their bases. Of several random combinations, the one whose eigenvalues are
    farthest apart has the smallest rounding errors.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    generic = torch.randn(2, 16, len(group), generator=generator, dtype=torch.float64, device="cpu")
    first, second = generic[..., group.cayley[:, group.inverse]].unbind()  # the element g is where h = g s
    values, vectors = torch.linalg.eigh(first + first.mT)
    gaps = values.diff(append=values.new_full((16, 1), math.inf))
    draw = gaps.where(gaps > 1e-9, math.inf).amin(1).argmax()
    ends = (gaps[draw] > 1e-9).nonzero().flatten() + 1
    kinds: list[list[Tensor]] = []
    for space in vectors[draw].split(ends.diff(prepend=ends.new_zeros(1)).tolist(), 1):
        for kind in kinds:
            overlap = space.T @ second[draw] @ kind[0]
            if overlap.shape[0] == overlap.shape[1] and overlap.norm() > 1e-7:
                u, _, v = torch.linalg.svd(overlap)  # a multiple of a rotation
                kind.append(space @ u @ v)
                break
        else:
            kinds.append([space])
    kinds.sort(key=lambda kind: (kind[0].shape[1], -float(kind[0].sum().abs())))
    kinds[0] = [kinds[0][0].abs()]
    return torch.cat([space for kind in kinds for space in kind], 1), tuple((k[0].shape[1], len(k)) for k in kinds)


def irreps(group: FiniteGroup) -> Irreps:
    """Dimension and multiplicity of every real irrep in the functions on a group."""
    return _decomposition(group)[1]


def fourier_basis(group: FiniteGroup) -> tuple[Float[Tensor, "H H"], Float[Tensor, "entries H"]]:
    """The Fourier basis, and the matrix that maps the weights w of a group-linear map to the entries of its blocks, for
    every irrep in the order (row, column)."""
    basis, kinds = _decomposition(group)
    index = relation_index(group, "relative")
    units = (index == torch.arange(len(index), device="cpu")[:, None, None]).double()
    blocks, entries, start = basis.T @ units @ basis, [], 0
    for dim, copies in kinds:
        entries.append(blocks[:, start : start + dim, start : start + dim].flatten(1))
        start += dim * copies
    return basis, torch.cat(entries, 1).T.contiguous()


def block_matrices(
    weight: Float[Tensor, "o i H"], table: Float[Tensor, "entries H"], kinds: Irreps
) -> tuple[Float[Tensor, "d*o d*i"], ...]:
    """The block of every irrep, for all channels. Coordinates come before channels."""
    with full_precision(weight.device):
        entries = table @ weight.to(table.dtype).flatten(0, 1).T
    entries = entries.to(weight.dtype).unflatten(1, weight.shape[:2])
    parts = zip(entries.split([d * d for d, _ in kinds]), kinds, strict=True)
    return tuple(part.unflatten(0, (d, d)).transpose(1, 2).flatten(2).flatten(0, 1) for part, (d, _) in parts)


def block_product(
    x: Float[Tensor, "*any H*in"], blocks: tuple[Tensor, ...], bias: Tensor | None, kinds: Irreps
) -> Float[Tensor, "*any H*out"]:
    """A group-linear map of Fourier coefficients, which come before channels in the order of the basis. ``bias`` is
    added to all group elements."""
    elements = sum(d * m for d, m in kinds)
    constant = None if bias is None else bias * elements**0.5  # the coefficient of the trivial irrep, which is first
    if is_autocast(x):
        return _products(kinds, x, constant, *blocks)
    return _products_of_rows(kinds, x.flatten(0, -2), constant, *blocks).unflatten(0, x.shape[:-1])


def _products(
    kinds: Irreps, x: Float[Tensor, "*any H*in"], constant: Tensor | None, *blocks: Tensor
) -> Float[Tensor, "*any H*out"]:
    parts = zip(x.split(_sizes(x, kinds), -1), _of_copies(blocks, kinds), strict=True)
    return torch.cat([F.linear(part, each, None if n else constant) for n, (part, each) in enumerate(parts)], -1)


def block_product_of_pixels(
    x: Float[Tensor, "B H*in pixels"], blocks: tuple[Tensor, ...], bias: Tensor | None, kinds: Irreps
) -> Float[Tensor, "B H*out pixels"]:
    """The same along the second of three axes."""
    parts, outs = x.split(_sizes(x.mT, kinds), 1), []
    for part, block in zip(parts, _of_copies(blocks, kinds), strict=True):
        outs.append(torch.bmm(block.expand(part.shape[0], -1, -1), part))
    if bias is not None:
        outs[0] = outs[0] + bias[:, None] * sum(d * m for d, m in kinds) ** 0.5
    return torch.cat(outs, 1)


def _sizes(x: Tensor, kinds: Irreps) -> list[int]:
    """The numbers of coefficients of each copy of each irrep."""
    channels = x.shape[-1] // sum(d * m for d, m in kinds)
    return [d * channels for d, m in kinds for _ in range(m)]


def _of_copies(blocks: Sequence[Tensor], kinds: Irreps) -> list[Tensor]:
    return [block for block, (_, copies) in zip(blocks, kinds, strict=True) for _ in range(copies)]


class _Product(torch.autograd.Function):
    """The products of rows with all blocks, which write into one tensor: a copy of the output takes a tenth of the time
    of a transformer block. The derivative consists of products of this kind."""

    @staticmethod
    def forward(ctx: Any, kinds: Irreps, x: Tensor, constant: Tensor | None, *blocks: Tensor) -> Tensor:
        out = x.new_empty(len(x), sum(d * m for d, m in kinds) * len(blocks[0]))
        parts = zip(x.split(_sizes(x, kinds), 1), out.split(_sizes(out, kinds), 1), strict=True)
        for (part, found), block in zip(parts, _of_copies(blocks, kinds), strict=True):
            torch.mm(part, block.T, out=found)
        if constant is not None:
            out[:, : len(constant)] += constant
        ctx.save_for_backward(x, *blocks)
        ctx.kinds, ctx.constants = kinds, None if constant is None else len(constant)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, *blocks), kinds, grad = ctx.saved_tensors, ctx.kinds, grad.contiguous()
        to_x = _products_of_rows(kinds, grad, None, *(block.T for block in blocks))
        parts = iter(zip(grad.split(_sizes(grad, kinds), 1), x.split(_sizes(x, kinds), 1), strict=True))
        to_blocks = []
        for _, copies in kinds:
            of_copies = [next(parts) for _ in range(copies)]
            total = of_copies[0][0].T @ of_copies[0][1]
            for one, other in of_copies[1:]:
                total = torch.addmm(total, one.T, other)
            to_blocks.append(total)
        return None, to_x, None if ctx.constants is None else grad[:, : ctx.constants].sum(0), *to_blocks


_products_of_rows = by_form(_products, _Product.apply)
