r"""Crystals: graphs that repeat by the vectors of a cell, and the waves that repeat with them.

The rows of a cell A are lattice vectors. Waves that repeat with it have wavevectors :math:`k = 2 \pi A^{-1} n` with n
three integers, so at a position x = s A their phase is :math:`2 \pi\, n \cdot s`: it hangs on the fractions s alone,
which are wrapped before they are multiplied.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...kept import ordinary_tensors
from ...precision import full_precision
from ...sequences import Sequences
from .euclidean_methods import EuclideanMethod

_MOST = 2**24  # candidates for waves of one cell, whose table would be larger than a memory
_FLAT = 1e-6  # the smallest volume of a cell, as a share of that of a box with edges as long


class Crystals(NamedTuple):
    """The cells of a batch of graphs and the waves of each, one of each pair :math:`\\pm n`, padded with zeros.

    Attributes:
        closed: bool ``(B,)``, which graphs have a cell; that of the others is the identity.
        volumes: ``(B,)``, of the cells.
        inverses: ``(B, 3, 3)``, of the cells.
        numbers: int64 ``(B, D, 3)``, n; zero where a graph has fewer waves than others.
        wavevectors: ``(B, D, 3)``, in radians per unit of length.
    """

    closed: Tensor
    volumes: Tensor
    inverses: Tensor
    numbers: Tensor
    wavevectors: Tensor

    @property
    def exist(self) -> Tensor:
        """bool ``(B, D)``, which waves there are."""
        return (self.numbers != 0).any(2)

    def fractions(self, pos: Tensor, batch: Tensor) -> Tensor:
        """Positions (3, T) in units of their graph's lattice vectors, within half of one, with gradients."""
        inverse = self.inverses[batch]
        fractions = torch.einsum("xt,txa->at", pos.to(inverse.dtype), inverse)
        return fractions - fractions.detach().round()


def crystals_of(cell: Tensor, max_wavenumber: float, count: int, like: Tensor, numbers: Tensor | None) -> Crystals:
    """What users give as cells, checked, with their waves.

    Args:
        cell: ``(3, 3)``, of all graphs, or ``(count, 3, 3)``; zeros for open graphs.
        max_wavenumber: the largest length of a wavevector, in radians per unit of length.
        count: of graphs.
        like: features of nodes.
        numbers: of :func:`wave_numbers`, which are found where they are not given.

    Raises:
        ValueError: for other shapes, flat or partly zero cells, and cells with no wave.
    """
    fits = isinstance(cell, Tensor) and cell.ndim in (2, 3) and tuple(cell.shape[-2:]) == (3, 3)
    if not fits or (cell.ndim == 3 and cell.shape[0] != count):
        came = tuple(cell.shape) if isinstance(cell, Tensor) else type(cell).__name__
        raise ValueError(f"cell must be (3, 3) or one a graph, ({count}, 3, 3), got {came}")
    if cell.device != like.device or not cell.is_floating_point():
        raise ValueError(f"cell must be floating point on {like.device} as x is, got {cell.dtype} on {cell.device}")
    if numbers is None and (torch.compiler.is_compiling() or checks.is_batched(cell)):
        raise ValueError("wave_numbers must be given with cell under torch.compile and torch.vmap, got None")
    dtype = torch.promote_types(torch.promote_types(cell.dtype, like.dtype), torch.float32)
    cells = cell.expand(count, 3, 3).to(dtype)
    closed = (cells != 0).flatten(1).any(1)
    if numbers is None:
        numbers = wave_numbers(cells, max_wavenumber)
    elif not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.device != like.device:
        got = f"{numbers.dtype} on {numbers.device}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"wave_numbers must be int64 on {like.device} as x is, got {got}")
    elif numbers.ndim != 3 or numbers.shape[0] != count or numbers.shape[2] != 3:
        raise ValueError(f"wave_numbers must be int64 ({count}, D, 3), got shape {tuple(numbers.shape)}")
    elif not numbers.shape[1] and checks.values_are_free(closed) and bool(closed.any()):
        raise ValueError("wave_numbers must be those of cell, got none for crystals")
    with full_precision(like.device):
        cells = torch.where(closed[:, None, None], cells, torch.eye(3, dtype=dtype, device=cells.device))
        inverses, volumes = torch.linalg.inv(cells), torch.linalg.det(cells).abs()
        return Crystals(closed, volumes, inverses, numbers, 2 * math.pi * numbers.to(dtype) @ inverses.mT)


def wave_numbers(cell: Tensor, max_wavenumber: float) -> Tensor:
    r"""The integers n of the waves :math:`0 < |k| <` ``max_wavenumber`` of each cell, one of each pair :math:`\pm n`.

    Reads the cells, which waits for the device on CUDA; equal cells are looked up.

    Args:
        cell: ``(B, 3, 3)``, rows the lattice vectors; zeros for graphs without.
        max_wavenumber: in radians per unit of length.

    Returns:
        int64 ``(B, D, 3)``, zero where a graph has fewer waves than another.

    Raises:
        ValueError: for cells that are flat, partly zero or not finite, and for those with no wave.
    """
    checks.positive_number(max_wavenumber=max_wavenumber)
    if not isinstance(cell, Tensor) or cell.ndim != 3 or tuple(cell.shape[1:]) != (3, 3):
        came = tuple(cell.shape) if isinstance(cell, Tensor) else type(cell).__name__
        raise ValueError(f"cell must be (B, 3, 3), got {came}")
    rows = cell.detach().to("cpu", torch.float64).flatten(1).tolist()
    found = [_numbers_of(tuple(row), float(max_wavenumber)) for row in rows]
    longest = max((len(numbers) for numbers in found), default=0)
    out = torch.zeros(len(found), longest, 3, dtype=torch.int64, device="cpu")
    for padded, numbers in zip(out, found, strict=True):
        padded[: len(numbers)] = numbers
    return out.to(cell.device)


@functools.lru_cache(maxsize=1024)
@ordinary_tensors()
def _numbers_of(entries: tuple[float, ...], max_wavenumber: float) -> Tensor:
    """(D, 3) of one cell, none where it is zero."""
    cell = torch.tensor(entries, dtype=torch.float64, device="cpu").view(3, 3)
    if not bool(cell.isfinite().all()):
        raise ValueError(f"cell must be finite, got {cell.tolist()}")
    lengths = cell.norm(dim=1)
    if not bool(lengths.any()):
        return torch.zeros(0, 3, dtype=torch.int64, device="cpu")
    if not bool(lengths.all()):
        raise ValueError(
            "cell must have three lattice vectors, or zeros alone for a graph that does not repeat, got "
            f"{cell.tolist()}: slabs and wires, which repeat along some directions only, have waves of all lengths "
            "along the others, and no sum of some is exact; give them a third vector, with vacuum"
        )
    if not float(cell.det().abs()) > _FLAT * float(lengths.prod()):
        raise ValueError(f"cell must have a volume, got lattice vectors in one plane: {cell.tolist()}")
    # |n_i| = |a_i . k| / 2 pi <= |a_i| max / 2 pi
    reach = (lengths * max_wavenumber / (2 * math.pi)).floor().long().tolist()
    if math.prod(2 * n + 1 for n in reach) > _MOST:
        sides = " x ".join(str(2 * n + 1) for n in reach)
        raise ValueError(
            f"max_wavenumber must leave fewer than {_MOST:,} waves to look through, got {max_wavenumber:g}, with "
            f"{sides} for the cell {cell.tolist()}: both have one unit of length"
        )
    axes = [torch.arange(-n, n + 1, device="cpu") for n in reach]
    numbers = torch.cartesian_prod(*axes)
    numbers = numbers[len(numbers) // 2 + 1 :]  # in this order n and -n lie opposite about zero: one of each pair
    wavevectors = 2 * math.pi * numbers.double() @ torch.linalg.inv(cell).T
    numbers = numbers[wavevectors.square().sum(1) < max_wavenumber**2]
    if not len(numbers):
        shortest = 2 * math.pi / float(lengths.max())
        raise ValueError(
            f"max_wavenumber must let some wave into the cell {cell.tolist()}, whose longest are about {shortest:.3g}, "
            f"got {max_wavenumber:g}"
        )
    return numbers


def attention_in_crystals(
    method: EuclideanMethod,
    pos: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    sequences: Sequences,
    crystals: Crystals,
    reduce: str = "sum",
) -> Tensor:
    r"""Attention of every node to those of its crystal and all their images, unchecked.

    .. math:: \mathrm{out}_i = \frac{1}{\sqrt d} \frac{1}{V} \sum_k \sum_c f_c(k)\, \phi_k(x_i, q_i)_c^\top
        \Big[ \sum_j \phi_k(x_j, k_j)_c v_j^\top \Big] \otimes Y(k / |k|)

    over all waves, V the volume of the cell. In a supercell the waves that the cell does not have sum to zero and the
    others to as many times more as its volume is larger, so its outputs are those of the cell.

    Args:
        pos, query, key, value: as :func:`attention_in_sequences`'s.
        weights: f, ``(B, H, D, F)``, alike for opposite waves.
        reduce: ``"sum"``, or ``"mean"``: divided by the number of nodes in place of the volume.
    """
    if sequences.are_empty:
        return method.of_nothing(value)
    exist = crystals.exist
    square = torch.where(exist, crystals.wavevectors.square().sum(2), 1.0)
    ways = (crystals.wavevectors / square.sqrt()[..., None]).to(value.dtype)
    weights = torch.where(exist[:, None, :, None], 2 * weights, 0.0)  # of both waves of a pair
    if reduce == "sum":
        weights = weights / crystals.volumes.to(weights.dtype)[:, None, None, None]
    else:
        weights = weights / sequences.sizes.clamp(min=1).to(weights.dtype)[:, None, None, None]
    waves = 2 * math.pi * crystals.numbers.to(value.dtype)
    fractions = sequences.zero_padding(crystals.fractions(pos, sequences.batch)).to(value.dtype)

    def kernel(pos: Tensor, query: Tensor, key: Tensor, value: Tensor, number: Tensor, _: Tensor | None) -> Tensor:
        chosen = number[0, :, 0].long()  # which graphs these are: the first node of each is none of the padding
        return method.attend_crystals(pos, query, key, value, waves[chosen], weights[chosen], ways[chosen])

    number = sequences.batch.to(value.dtype)[None]
    return sequences.zero_padding(sequences.mix(kernel, fractions, query, key, value, number))
