r"""Group-linear maps in the Fourier basis of a finite group.

A map :math:`M(w)[h, s] = w[h^{-1} s]` of functions on a group commutes with left multiplications. In the basis of the
real irreps it is block diagonal: an irrep of dimension d has m equal blocks d x d, with m = d for irreps of real type,
d / 2 for complex and d / 4 for quaternionic type. This takes :math:`\sum d^2 m` products instead of :math:`|H|^2`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import FiniteGroup
from ..shapes import Float
from ..torch_state import by_form, cached, full_precision, is_autocast, is_transformed
from .encodings import relation_index

EPS = 1e-6
TILE = 1 << 16  # numbers of a tile that stays in a processor's cache
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


def _dims(kinds: Irreps) -> list[int]:
    """The dimension of each copy of each irrep."""
    return [d for d, m in kinds for _ in range(m)]


def _of_copies(blocks: Sequence[Tensor], kinds: Irreps) -> list[Tensor]:
    return [block for block, (_, copies) in zip(blocks, kinds, strict=True) for _ in range(copies)]


# Tokens have coefficients in two layouts: "rows", where coefficients come before channels, and "coordinates", whose
# first axis is that of coefficients. With rows, products are few and large. With coordinates, a change of basis is one
# product with a small matrix. Products go from one to the other, so that no layout costs a copy.


def to_coordinates(
    x: Float[Tensor, "rows H*in"], blocks: tuple[Tensor, ...], bias: Float[Tensor, " out"] | None, kinds: Irreps
) -> Float[Tensor, "H rows out"]:
    """A group-linear map of rows to coordinates. ``bias`` is added to all group elements."""
    return (_coordinates if is_autocast(x) else _to_coordinates)(kinds, x, bias, *blocks)


def to_rows(
    x: Float[Tensor, "H rows in"], blocks: tuple[Tensor, ...], bias: Float[Tensor, " out"] | None, kinds: Irreps
) -> Float[Tensor, "rows H*out"]:
    """A group-linear map of coordinates to rows. ``bias`` is added to all group elements."""
    return (_rows if is_autocast(x) else _to_rows)(kinds, x, bias, *(block.T for block in blocks))


def _parts(kinds: Irreps, rows: Tensor, blocks: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Each copy's part of rows, and its block cut into the parts of its coordinates, ``(C, d R)``."""
    for part, block, dim in zip(
        rows.split(_sizes(rows, kinds), 1), _of_copies(blocks, kinds), _dims(kinds), strict=True
    ):
        yield part, block.chunk(dim)


def _constant(bias: Tensor, kinds: Irreps) -> Tensor:
    """The coefficient of the trivial irrep, which is first, of a constant function."""
    return bias * sum(d * m for d, m in kinds) ** 0.5


def _coordinates(kinds: Irreps, x: Tensor, bias: Tensor | None, *blocks: Tensor) -> Tensor:
    outs = [F.linear(part, weight) for part, weights in _parts(kinds, x, blocks) for weight in weights]
    if bias is not None:
        outs[0] = outs[0] + _constant(bias, kinds)
    return torch.stack(outs)


def _rows(kinds: Irreps, x: Tensor, bias: Tensor | None, *blocks: Tensor) -> Tensor:
    given, outs = iter(x.unbind()), []
    for block, dim in zip(_of_copies(blocks, kinds), _dims(kinds), strict=True):
        first, *others = (next(given) @ weight for weight in block.chunk(dim))
        outs.append(sum(others, first))
    if bias is not None:
        outs[0] = outs[0] + _constant(bias, kinds)
    return torch.cat(outs, 1)


class _ToCoordinates(torch.autograd.Function):
    """Products that write into one tensor. The derivative consists of products of these kinds."""

    @staticmethod
    def forward(ctx: Any, kinds: Irreps, x: Tensor, bias: Tensor | None, *blocks: Tensor) -> Tensor:
        out = x.new_empty(sum(d * m for d, m in kinds), len(x), len(blocks[0]))
        found = iter(out)
        for part, weights in _parts(kinds, x, blocks):
            for weight in weights:
                torch.mm(part, weight.T, out=next(found))
        if bias is not None:
            out[0] += _constant(bias, kinds)
        ctx.save_for_backward(x, *blocks)
        ctx.kinds = kinds
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, *blocks), kinds = ctx.saved_tensors, ctx.kinds
        to_bias = _constant(grad[0].sum(0), kinds) if ctx.needs_input_grad[2] else None
        return None, _to_rows(kinds, grad, None, *blocks), to_bias, *_of_blocks(kinds, x, grad)


class _ToRows(torch.autograd.Function):
    """The same in the other direction."""

    @staticmethod
    def forward(ctx: Any, kinds: Irreps, x: Tensor, bias: Tensor | None, *blocks: Tensor) -> Tensor:
        channels = blocks[0].shape[1]
        out, given = x.new_empty(x.shape[1], len(x) * channels), iter(x)
        for part, (first, *others) in _parts(kinds, out, blocks):
            torch.mm(next(given), first, out=part)
            for weight in others:
                part.addmm_(next(given), weight)
        if bias is not None:
            out[:, :channels] += _constant(bias, kinds)
        ctx.save_for_backward(x, *blocks)
        ctx.kinds, ctx.channels = kinds, channels
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, *blocks), kinds = ctx.saved_tensors, ctx.kinds
        to_bias = _constant(grad[:, : ctx.channels].sum(0), kinds) if ctx.needs_input_grad[2] else None
        return None, _to_coordinates(kinds, grad, None, *blocks), to_bias, *_of_blocks(kinds, grad, x)


def _of_blocks(kinds: Irreps, rows: Tensor, coordinates: Tensor) -> list[Tensor]:
    """The gradients of blocks: products of both sides, summed over the copies of an irrep."""
    parts = iter(zip(rows.split(_sizes(rows, kinds), 1), coordinates.split(_dims(kinds)), strict=True))
    totals = []
    for dim, copies in kinds:
        factors = [(b.mT, a.expand(dim, -1, -1)) for a, b in (next(parts) for _ in range(copies))]
        total = torch.bmm(*factors[0])
        for one, other in factors[1:]:
            total = torch.baddbmm(total, one, other)
        totals.append(total.reshape(-1, total.shape[2]))  # batched gradients have no rule for flatten
    return totals


_to_coordinates = by_form(_coordinates, _ToCoordinates.apply)
_to_rows = by_form(_rows, _ToRows.apply)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class _Normalised(torch.autograd.Function):
    """The derivative needs the result and the factor, and not the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(EPS))
        out = x * factor
        ctx.save_for_backward(out, factor)
        ctx.set_materialize_grads(False)
        return out, factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, to_factor: Tensor | None) -> Tensor:  # type: ignore[override]
        out, factor = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        along = torch.linalg.vecdot(grad, out)[..., None]
        along = along if to_factor is None else along + to_factor * factor
        return torch.addcmul(grad, out, along, value=-1 / out.shape[-1]) * factor


# Divide by the root mean square over group elements and channels, which is the same in the Fourier basis.
normalised = by_form(_normalised, lambda x: _Normalised.apply(x)[0])


def _gelu(x: Float[Tensor, "H rows C"], basis: Float[Tensor, "H H"]) -> Float[Tensor, "H rows C"]:
    return (basis.T @ F.gelu(basis @ x.flatten(1))).view_as(x)


_gelu_backward = torch.ops.aten.gelu_backward


class _Gelu(torch.autograd.Function):
    """In tiles that stay in the processor's cache, since each of the three steps is bound by memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, basis: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for part, found in _tiles(x, out):
            torch.mm(basis.T, F.gelu(basis @ part), out=found)
        ctx.save_for_backward(x, basis)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, basis = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed(grad):
            to_x = _gelu_backward(basis @ grad.reshape(len(x), -1), basis @ x.reshape(len(x), -1))
            return (basis.T @ to_x).view(x.shape), None
        out = torch.empty_like(x)
        for part, after, found in _tiles(x, grad.contiguous(), out):
            torch.mm(basis.T, _gelu_backward(basis @ after, basis @ part), out=found)
        return out, None


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.flatten(1).split(max(1, TILE // len(x)), 1) for x in tensors), strict=True)


_gelu_of_coordinates = by_form(_gelu, _Gelu.apply)


def gelu(x: Float[Tensor, "H rows C"], basis: Float[Tensor, "H H"]) -> Float[Tensor, "H rows C"]:
    """GELU of group elements, from coordinates to coordinates."""
    return (_gelu_of_coordinates if x.device.type == "cpu" and not is_autocast(x) else _gelu)(x, basis)
