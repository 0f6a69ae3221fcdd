"""Attention of clouds, slabs and crystals through kernels of Ewald's form, by whichever method is least work."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision, transformed
from ...ragged import Ragged, Rows, readable
from .kernels import EwaldKernels, EwaldNodes, Part, Product, every_product, parts_of, split_at
from .lattices import TAPER, Cells, cells_of, count_of_waves
from .mesh import mesh_available
from .sums import lattice_sums, pair_sums

METHODS = ("auto", "pairs", "waves", "mesh")
_WIDE = 1000  # waves for each node of a graph that repeats, which no crystal has: its cell is far wider than it is
_WARNED = 1e6  # nanoseconds, from which on it is said
_ALWAYS_PAIRS = 512  # nodes of an open cloud up to which nothing else is worth counting

# Nanoseconds on one core of a CPU: of a kernel's value, of a product in a matrix product, of a phase, of a point's
# share in one grid cell of its transform, of a cell in a fast Fourier transform.
_KERNEL, _PRODUCT, _PHASE, _SPREAD, _GRID = 8.0, 0.04, 4.0, 1.8, 10.0


def ewald_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos: Tensor,
    kernels: EwaldKernels,
    batch: Tensor | None = None,
    *,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    method: str = "auto",
    batch_size: int | None = None,
    max_num_nodes: int | None = None,
) -> Tensor:
    r"""Attention of nodes in space through kernels K, Gaussians and smeared Coulomb potentials, and their derivatives.

    .. math:: \mathrm{out}_i = \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j)

    with solid harmonics Y and every product of a value and a harmonic. The sum includes i itself, and, where graphs
    repeat, all images of each node; of potentials in three directions without the wave k = 0 (a uniform background
    makes every cell neutral). Three methods lead to it: pairs, exactly, where nothing repeats; the waves that repeat
    with the cell, or with a box around what is open, where potentials end at a distance that no two nodes have; and
    these waves by non-uniform fast Fourier transforms.

    Args:
        query, key: ``(T, heads, C, A)``, contracted over A for each of the C kernels.
        value: ``(T, heads, V)``.
        pos: ``(T, 3)``. Give large coordinates in float64, whatever the features are.
        kernels: their widths, gains and bounds.
        batch: sorted int64 ``(T,)``, the graph of each node; ``None`` means one.
        cell: lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``.
        pbc: bool ``(3,)`` or ``(B, 3)``, along which of them graphs repeat; ``None`` for those that are not zero.
        method: ``"pairs"``, ``"waves"``, ``"mesh"`` (which needs the extra ``mesh``), or ``"auto"``: for every graph by
            itself whichever is least work.
        batch_size, max_num_nodes: number of graphs and a bound of their sizes, read from ``batch`` where not given.

    Returns:
        ``(T, heads, V (lmax + 1)²)``, in float32 where values have half precision.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Ewald 1921; attention in linear time by waves, Frank et al. (arXiv 2412.08541); in crystals, Kosmala et al.
    (arXiv 2303.04791); potentials that end, Vico, Greengard and Ferrando 2016.

    Example:
        >>> import torch
        >>> widths, gains = torch.tensor([[1.0, 1.5]]), torch.ones(1, 2, 2)
        >>> kernels = EwaldKernels(widths, gains, bounds=((0.8, 1.6), (1.0, 2.0)), gaussians=1)
        >>> q, k, v = torch.ones(20, 1, 2, 1), torch.ones(20, 1, 2, 1), torch.randn(20, 1, 5)
        >>> ewald_attention(q, k, v, 4 * torch.rand(20, 3), kernels).shape
        torch.Size([20, 1, 20])
    """
    checks.choice("method", method, METHODS)
    checks.alike(4, query=query, key=key)
    heads, count = kernels.widths.shape
    if query.shape[1:3] != (heads, count):
        raise ValueError(f"query must be (T, {heads}, {count}, A) as kernels are, got {tuple(query.shape)}")
    if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[:2] != query.shape[:2]:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"value must be ({query.shape[0]}, {heads}, V), got {came}")
    checks.same_kind(value, query, "value")
    checks.half_precision(value=value)
    pos = checks.positions(pos, (query.shape[0], 3), query, "attention depends on them")
    ragged = Ragged.flat(query, batch, batch_size, max_num_nodes)
    cells = cells_of(cell, pbc, ragged.count, query)
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        nodes = EwaldNodes(pos, *(x.to(dtype) for x in (query, key, value)))
        return attention_of_nodes(nodes, kernels, ragged, cells, every_product(kernels.lmax), method)


def attention_of_nodes(
    nodes: EwaldNodes, kernels: EwaldKernels, ragged: Ragged, cells: Cells | None, product: Product, method: str
) -> Tensor:
    """:func:`ewald_attention`, unchecked but for what hangs on values, with any product of values with harmonics of a
    degree, linear in both."""
    nodes = nodes._replace(pos=ragged.centred(nodes.pos))
    unread = ragged.known is None and (cells is None or kernels.max_waves is not None)  # as sizes are given on CUDA
    if unread or not readable(nodes.pos) or not (cells is None or readable(cells.vectors)):
        return _without_reading(nodes, kernels, ragged, cells, product, method)
    sizes = ragged.read() if ragged.ranks is None else ragged.totals.tolist()
    repeats = [False] * ragged.count if cells is None else cells.periodic.any(1).tolist()
    mesh = mesh_available() and not transformed()
    if method == "pairs" and any(repeats):
        raise ValueError("method must be 'auto', 'waves' or 'mesh' for graphs that repeat, got 'pairs'")
    if method == "mesh" and not mesh:
        raise ValueError("method='mesh' needs pytorch-finufft (the extra mesh) and no torch.func around it")
    value, one = nodes.value, nodes.value.new_zeros(1, 1)
    contracted, channels = nodes.query.shape[3], value.shape[2] + product(value[:0], one, 0).shape[2]
    chosen: dict[tuple, list[int]] = {}
    for graph, size in enumerate(sizes):  # on all ranks, which have to choose alike
        if size:
            own = cells if repeats[graph] else None
            best = _cheapest(method, graph, size, nodes.pos, ragged, own, kernels, contracted, channels, mesh)
            chosen.setdefault((*best, size.bit_length()), []).append(graph)
    if not chosen:
        return product(value, one, 0) * 0
    single = next(iter(chosen)) if len(chosen) == 1 and ragged.even else None  # whose rows need no copy

    def kernel(pos: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
        best, splits, *_ = single or rows.key
        return _of_rows(best, rows, EwaldNodes(pos, query, key, value), kernels, cells, product, splits)

    return ragged.mix(kernel, *nodes, groups=None if single else chosen)


def _of_rows(
    method: str, rows: Rows, nodes: EwaldNodes, kernels: EwaldKernels, cells: Cells | None, product: Product,
    splits: tuple[float, ...] = (),
) -> Tensor:  # fmt: skip
    """(b, longest, H, E) of some graphs."""
    if method == "pairs":
        return pair_sums(nodes, kernels, product)
    cells = (cells or Cells.none(rows.ragged.count, nodes.pos.device)).of(rows.graph)
    splits, mesh, ranks = () if kernels.max_waves else splits, method == "mesh", rows.ragged.ranks
    return lattice_sums(nodes, rows.mask, kernels, cells, product, splits, mesh, ranks)


def _without_reading(
    nodes: EwaldNodes, kernels: EwaldKernels, ragged: Ragged, cells: Cells | None, product: Product, method: str
) -> Tensor:
    """All graphs in one group, by both methods where some may repeat and others not."""
    if method == "mesh" or ragged.ranks is not None:
        what = "method must not be 'mesh'" if method == "mesh" else "process_group must be None"
        raise ValueError(f"{what} while a model is traced or mapped over")
    if method == "pairs" and cells is not None:
        raise ValueError("method must be 'auto' or 'waves' with cell, got 'pairs'")
    rows = ragged.rows(whole=True)
    packed = EwaldNodes(*map(rows.pack, nodes))

    def run(method: str, cells: Cells | None) -> Tensor:
        return rows.unpack(_of_rows(method, rows, packed, kernels, cells, product))

    if cells is None and method != "waves":
        return run("pairs", None)
    if kernels.max_waves is None:
        raise ValueError("max_waves must be given with cell while a model is traced or mapped over, got None")
    if method == "waves" or cells is None:
        return run("waves", cells)
    repeats = cells.periodic.any(1)
    small = Cells(cells.vectors, cells.periodic | ~repeats[:, None])  # of open graphs: what they give is not used
    return torch.where(ragged.spread(repeats)[:, None, None], run("waves", small), run("pairs", None))


def _cheapest(
    method: str, graph: int, size: int, pos: Tensor, ragged: Ragged, cells: Cells | None, kernels: EwaldKernels,
    contracted: int, channels: int, mesh: bool,
) -> tuple[str, tuple[float, ...], int]:  # fmt: skip
    """The method for one graph of this size on all ranks, which repeats where there are cells (of all); the widths at
    which potentials of an open one are split for waves; the logarithm of its number of waves, by which like graphs are
    told. Contracted are A axes of queries and keys; channels are V + E, of values and outputs of a head."""
    open_ = cells is None
    if method == "pairs" or (open_ and method == "auto" and ragged.ranks is None and size <= _ALWAYS_PAIRS):
        return "pairs", (), 0
    splits, waves = _waves(*_extents(graph, pos, ragged, cells), kernels)
    bits = max(1, int(max(waves))).bit_length()
    heads, count = kernels.widths.shape
    harmonics = (kernels.lmax + 1) ** 2
    width = heads * contracted * channels
    prices = {"waves": sum(size * n * (_PHASE + 2 * _PRODUCT * width) for n in waves)}
    if not open_ and max(waves) > _WIDE * size and prices["waves"] > _WARNED:
        warnings.warn(
            f"cell of graph {graph} is far wider than its {size} nodes: {sum(waves):,.0f} waves, about "
            f"{prices['waves'] / 1e9:.2g} s on a core; say with pbc=False along which lattice vectors it does not "
            "repeat, or take a larger width",
            stacklevel=2,
        )
    if method != "auto":
        return method, splits, bits
    if open_ and ragged.ranks is None:
        a_kernel = _KERNEL * (kernels.lmax + 1) + contracted * _PRODUCT
        prices["pairs"] = size**2 * heads * (count * a_kernel + harmonics * channels * _PRODUCT)
    if mesh:
        cells_of_a_point = (1 - math.log10(kernels.error)) ** 3
        prices["mesh"] = sum(width / 2 * (size * cells_of_a_point * _SPREAD + 30 * n * _GRID) for n in waves)
    return min(prices, key=lambda name: prices[name]), splits, bits


def _waves(volume: float, sides: list[float], kernels: EwaldKernels) -> tuple[tuple[float, ...], list[float]]:
    """The widths to split potentials of an open cloud at that leave fewest waves, and how many each part has."""
    phase = kernels.phase

    def count(parts: list[Part]) -> list[float]:
        return [count_of_waves(volume * _box(sides, part, phase), TAPER * phase / part.least) for part in parts]

    splits: list[float] = []
    if len(sides) == 3:
        for c, (low, high) in list(enumerate(kernels.bounds))[kernels.gaussians : kernels.ripples]:
            tried = [high * 2 ** (n / 2) for n in range(20)]
            splits.append(min(tried, key=lambda width: sum(count(split_at(c, low, width)))))
    return tuple(splits), count(parts_of(kernels, splits))


def _extents(graph: int, pos: Tensor, ragged: Ragged, cells: Cells | None) -> tuple[float, list[float]]:
    """The volume of a cell and no sides, the area and the thickness of a slab, or one and the sides of a cloud."""
    device, start, size = pos.device, int(ragged.starts[graph]), int(ragged.sizes[graph])
    cell = Cells.none(1, device) if cells is None else cells.of(torch.tensor([graph], device=device))
    sides = cell.extents(pos.detach()[None, start : start + size], None, ragged.ranks)[0]
    volume = torch.where(cell.periodic[..., None], cell.vectors, cell.normals()).detach().det().abs()
    return float(volume), sides[~cell.periodic[0]].tolist()


def _box(sides: list[float], part: Part, phase: float) -> float:
    """The volume, or for slabs the thickness, of the box around a graph of these sides, as lattices have it."""
    margin = phase * part.largest
    if not part.ends:
        return math.prod(side + margin for side in sides)
    radius = math.hypot(*sides) + margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + margin for side in sides)
