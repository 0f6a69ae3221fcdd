"""Ewald attention by sums over reciprocal vectors of a cell, or of a box along directions that do not repeat, and the
choice of the method for each graph and kernel, by the numbers of nodes and of vectors."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ...modes import is_readable, runs_eagerly
from ...node_batch import NodeBatch
from ...ranks import Ranks
from ..operators import tile_numbers
from ..tiles import is_whole, joined, recomputed
from .cells import TAPER, Cells, Lattice, count_of_vectors, lattice_of
from .kernels import Coulomb, Interaction, Kernel, Product, Range, Sources

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped


_TOGETHER = 16  # number of transforms, of two real channels each, whose grids are in memory at once
_PLANS = 8  # number of plans that are kept for the next call, each with the memory of its grid
_LIBRARIES = {"cpu": "finufft", "cuda": "cufinufft"}


@functools.cache
def nufft_available(kind: str) -> bool:
    """True if the library for non-uniform fast Fourier transforms on a kind of device can be imported."""
    try:
        importlib.import_module(_LIBRARIES[kind])
    except (ImportError, KeyError):
        return False
    return True


def sums_over_nodes(
    angles: Float[Tensor, "graphs nodes 3"], indices: Int[Tensor, "graphs vectors 3"],
    sources: Float[Tensor, "graphs nodes channels"], error: float,
) -> Float[Tensor, "graphs 2 vectors channels"]:  # fmt: skip
    """Sums over nodes j for all reciprocal vectors k: sum_j cos(n_k . x_j) c_j and sum_j sin(n_k . x_j) c_j, with
    angles x, integers n and sources c, to a relative ``error``."""
    return _Sums.apply(_over_nodes, _at_nodes, angles, indices, sources, error)


def sums_at_nodes(
    angles: Float[Tensor, "graphs nodes 3"], indices: Int[Tensor, "graphs vectors 3"],
    table: Float[Tensor, "graphs 2 vectors channels"], error: float,
) -> Float[Tensor, "graphs nodes channels"]:  # fmt: skip
    """Sums over reciprocal vectors k at all nodes i: sum_k cos(n_k . x_i) T^cos_k + sin(n_k . x_i) T^sin_k, for a table
    T, to a relative ``error``."""
    return _Sums.apply(_at_nodes, _over_nodes, angles, indices, table, error)


class _Sums(torch.autograd.Function):
    """A sum over nodes or over reciprocal vectors, for each graph. The two sums are transposes of each other.

    Backward calls this function with the two sums swapped, so it has derivatives of any order; a registered operator
    would need one more backward operator for each order. Tracers never reach it, since reciprocal vectors are read.
    """

    @staticmethod
    def forward(ctx, sums, transpose, angles: Tensor, indices: Tensor, x: Tensor, error: float) -> Tensor:
        ctx.save_for_backward(angles, indices, x)
        ctx.sums, ctx.transpose, ctx.error = sums, transpose, error
        return torch.stack([sums(*graph, error) for graph in zip(angles, indices, x, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        angles, indices, x = ctx.saved_tensors
        of_angles = of_x = None
        if ctx.needs_input_grad[4]:
            of_x = _Sums.apply(ctx.transpose, ctx.sums, angles, indices, grad, ctx.error)
        if ctx.needs_input_grad[2]:
            table, at_nodes = (grad, x) if ctx.sums is _over_nodes else (x, grad)
            of_angles = _slopes(angles, indices, table, at_nodes, ctx.error)
        return None, None, of_angles, None, of_x, None


def _slopes(angles: Tensor, indices: Tensor, table: Tensor, at_nodes: Tensor, error: float) -> Tensor:
    """Derivatives by the angles of the scalar product of ``at_nodes`` and the sums of ``table`` at nodes."""
    rotated = torch.stack([table[:, 1], -table[:, 0]], 1)
    steps = indices.to(table.dtype)
    along = (rotated * steps[:, None, :, None, axis] for axis in range(3))
    return torch.stack([(sums_at_nodes(angles, indices, x, error) * at_nodes).sum(2) for x in along], 2)


def _over_nodes(angles: Tensor, indices: Tensor, sources: Tensor, error: float) -> Tensor:
    """:func:`sums_over_nodes` of one graph. A pair of channels is the real and imaginary part of one transform."""
    sides, index, opposite = _grid(indices)
    pairs = torch.complex(*_in_pairs(sources.T).unbind(1)).contiguous()
    out = []
    for chunk in pairs.split(_TOGETHER):
        modes = _transform(1, angles, chunk, sides, error).flatten(1)
        plus, minus = modes[:, index], modes[:, opposite].conj()
        first, second = (plus + minus) / 2, (plus - minus) / 2j
        out.append(torch.stack([first, second], 1).flatten(0, 1))  # sums of exp(-i n x), as cosines minus i sines
    sums = torch.cat(out)[: sources.shape[1]]
    return torch.stack([sums.real, -sums.imag]).mT


def _at_nodes(angles: Tensor, indices: Tensor, table: Tensor, error: float) -> Tensor:
    """:func:`sums_at_nodes` of one graph: the real parts of sums of exp(i n x) (T^cos - i T^sin). A pair of channels is
    the real and imaginary part of one transform, each with modes that are conjugate at opposite vectors."""
    sides, index, opposite = _grid(indices)
    modes = _in_pairs(torch.complex(table[0], -table[1]).T / 2)  # pairs, 2, D
    out = []
    for chunk in modes.split(_TOGETHER):
        first, second = chunk.unbind(1)
        grid = chunk.new_zeros(len(chunk), sides[0] * sides[1] * sides[2])
        grid.index_add_(1, index, first + 1j * second)
        grid.index_add_(1, opposite, first.conj() + 1j * second.conj())
        values = _transform(2, angles, grid.unflatten(1, sides), sides, error)
        out.append(torch.stack([values.real, values.imag], 1).flatten(0, 1))
    return torch.cat(out)[: table.shape[2]].T.contiguous()


def _in_pairs(channels: Shaped[Tensor, "channels numbers"]) -> Shaped[Tensor, "pairs 2 numbers"]:
    """Channels in pairs; if their number is odd, the last channel is paired with zeros."""
    return torch.nn.functional.pad(channels, (0, 0, 0, channels.shape[0] % 2)).unflatten(0, (-1, 2))


def _grid(indices: Tensor) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """Sides of the grid of modes, and the indices of n and of -n on it."""
    half = indices.abs().amax(0)
    first, second, third = (2 * half + 1).tolist()
    strides = indices.new_tensor([second * third, third, 1])
    index, opposite = (((half + n) * strides).sum(1) for n in (indices, -indices))  # CUDA has no integer matrix product
    return (first, second, third), index, opposite


def _transform(kind: int, angles: Tensor, data: Tensor, sides: tuple[int, int, int], error: float) -> Tensor:
    """Non-uniform transforms of (transforms, nodes) to modes (kind 1, with exp(-i n x)), or of (transforms, *sides) to
    nodes (kind 2, with exp(i n x)).

    The tolerance is a third of the promised error, or what the precision allows. On CPUs the smaller of the library's
    two grids is used if it is accurate enough; some releases of cufinufft do not have it.
    """
    device, single = data.device, data.dtype == torch.complex64
    tolerance = max(error / 3, 3e-5 if single else 1e-13)
    if device.type == "cpu":
        upsampling = 1.25 if tolerance > 1e-8 else 2.0
        options: dict[str, Any] = {"nthreads": torch.get_num_threads(), "upsampfac": upsampling}
    else:
        options = {"gpu_device_id": device.index, "gpu_stream": torch.cuda.current_stream(device).cuda_stream}
    dtype = "complex64" if single else "complex128"
    names = tuple(sorted(options.items()))
    plan = _plan(threading.get_ident(), device.type, kind, sides, len(data), tolerance, dtype, names)
    points = angles.detach().remainder(2 * math.pi).T.contiguous()
    if device.type == "cuda":
        plan.setpts(*points)
        return plan.execute(data)
    plan.setpts(*points.numpy())
    return torch.from_numpy(plan.execute(data.numpy()))


@functools.lru_cache(_PLANS)
def _plan(
    thread: int, device: str, kind: int, sides: tuple[int, int, int], transforms: int, tolerance: float, dtype: str,
    options: tuple[tuple[str, Any], ...],
) -> Any:  # fmt: skip
    """The plan of a ``thread`` for a stream of a device. A plan holds the points of a call, so threads cannot share
    one."""
    library = importlib.import_module(_LIBRARIES[device])
    return library.Plan(kind, sides, transforms, tolerance, 1 if kind == 2 else -1, dtype, **dict(options))


Mix = tuple[Product, "Ranks | None"]
_VECTORS = 1 << 22  # numbers in the largest tensor of a tile of reciprocal vectors on a CPU
Images = tuple[int, int, int]
MANY = 4000  # open graphs with fewer nodes are summed directly
_WIDE = 1000  # reciprocal vectors per node; with more, a cell is far wider than the graph in it
_WARNED = 30_000  # reciprocal vectors from which on wide cells get a warning
# costs of a reciprocal vector, for each node and by itself, of a pair of images, and of sums over images by themselves,
# relative to that of a channel of a node; from measured times on one core of a CPU
_PHASE, _VECTOR, _PAIR, _CALL = 4, 40, 20, 2e4


class Term(NamedTuple):
    """The form of the sum over a kernel.

    Attributes:
        width: the width at which a Coulomb kernel is split; ``None`` means that it is not.
        images: images over which the kernel, or its short-range part, is summed in real space; ``None`` means that sums
            over reciprocal vectors have all of it.
    """

    width: float | None = None
    images: Images | None = None


class Choice(NamedTuple):
    """The choice for a graph. Graphs with equal choices are computed together.

    Attributes:
        method: the method.
        terms: how each kernel is summed.
        vectors: number of binary digits of the number of reciprocal vectors.
        nodes: number of binary digits of the number of nodes.
    """

    method: str
    terms: tuple[Term, ...] = ()
    vectors: int = 0
    nodes: int = 0


def choices_of(
    method: str, sizes: Mapping[int, int], pos: Tensor, channels: int, interaction: Interaction, node_batch: NodeBatch,
    cells: Cells | None,
) -> dict[int, Choice]:  # fmt: skip
    """Choose the method of graphs with these ``sizes`` and with ``channels`` of each node and kernel. The rule of
    ``"auto"`` follows from measured times on one core of a CPU."""
    nufft = nufft_available(pos.device.type) and runs_eagerly()
    if method == "nufft" and not nufft:
        raise ValueError(
            "method='nufft' needs finufft (the extra nufft) on a CPU, cufinufft (the extra nufft-cuda) on CUDA, and "
            "no torch.func around it"
        )
    local, auto, choices = node_batch.ranks is None, method == "auto", {}
    each = Cells.none(node_batch.count, pos.device) if cells is None else cells
    full = torch.where(each.periodic[..., None], each.vectors, each.normals()).detach()
    volumes, planes = full.det().abs().tolist(), (1 / torch.linalg.inv(full).norm(dim=1)).tolist()
    for graph, size in sizes.items():
        repeats, sides = each.periodic[graph], []
        if not (crystal := bool(repeats.all())):
            start, graphs = int(node_batch.starts[graph]), torch.tensor([graph], device=pos.device)
            points = pos.detach()[None, start : start + int(node_batch.sizes[graph])]
            sides = each.select(graphs).extents(points, None, node_batch.ranks)[0][~repeats].tolist()
        by_images = local and auto and crystal and interaction.max_hkl is None
        extents = _Extents(volumes[graph], sides, planes[graph])
        terms, vectors = _terms(extents, interaction, (size, channels) if by_images else None)
        most, is_open = max(1.0, *vectors), len(sides) == 3
        if not is_open and sum(vectors) > max(_WARNED, _WIDE * size):
            warnings.warn(
                f"cell of graph {graph} is far wider than its {size} nodes and needs {sum(vectors):,.0f} reciprocal "
                "vectors: say with pbc=False along which lattice vectors it does not repeat, or take a larger width",
                stacklevel=2,
            )
        if auto and is_open and local and (not nufft or size < MANY or size**2 < 1250 * most):
            choices[graph] = Choice("direct")
            continue
        automatic = "nufft" if nufft and size > 2000 and most > 8000 else "ewald"
        choices[graph] = Choice(automatic if auto else method, terms, int(most).bit_length())
    return choices


class _Extents(NamedTuple):
    """The volume of a cell along directions that repeat, and the extents along the others: the volume and no sides for
    a crystal, the area and the thickness for a slab, 1 and three sides for an open graph. ``planes`` are the distances
    between lattice planes."""

    volume: float
    sides: list[float]
    planes: list[float]


def _terms(
    extents: _Extents, interaction: Interaction, size: tuple[int, int] | None
) -> tuple[tuple[Term, ...], list[float]]:
    """Choose the terms that cost least. Return them and the number of reciprocal vectors of each part of a kernel.

    With a ``size`` of a crystal, its numbers of nodes and channels, parts of kernels that decay fast may be summed over
    images. Widths follow from cells and not from positions.
    """
    scaled, is_open, terms, counts = interaction.scaled_cutoff, len(extents.sides) == 3, [], []

    def options(kernel: Kernel, bounds: tuple[float, float], reach: Range) -> Iterator[tuple[Term, list[Range]]]:
        """Terms, and the ranges of their parts in reciprocal space."""
        if not (is_open and isinstance(kernel, Coulomb)):
            yield Term(), [reach]
        if size is not None and not reach.long_range:
            yield Term(None, _images(reach.margin, extents)), []
        if isinstance(kernel, Coulomb) and (is_open or size is not None):
            for width in (bounds[1] * 2 ** (n / 2) for n in range(20)):
                short, long = kernel.split_ranges(bounds[0], width, scaled)
                yield (Term(width), [short, long]) if is_open else (Term(width, _images(short.margin, extents)), [long])

    for kernel in interaction.kernels:
        for bounds, reach in zip(kernel.bounds, kernel.ranges(scaled), strict=True):
            priced = []
            for term, ranges in options(kernel, bounds, reach):
                each = [count_of_vectors(extents.volume * _box(extents.sides, x), TAPER * x.cutoff) for x in ranges]
                priced.append((_cost(sum(each), term.images, *size or (1, 1)), term, each))
            _, term, each = min(priced, key=lambda option: option[0])
            terms.append(term)
            counts += each
    return tuple(terms), counts


def _cost(vectors: float, images: Images | None, nodes: int, channels: int) -> float:
    near = 0.0 if images is None else _CALL + _PAIR * nodes**2 * math.prod(2 * n + 1 for n in images)
    return near + vectors * (nodes * (_PHASE + channels) + _VECTOR)


def _images(margin: float, extents: _Extents) -> Images:
    """Images around the nearest one within a margin, in a cell with these distances between lattice planes."""
    a, b, c = (max(0, math.ceil(margin / distance - 0.5)) for distance in extents.planes)
    return a, b, c


def _box(sides: list[float], reach: Range) -> float:
    """The volume, or for slabs the thickness, of the box that :func:`.cells.lattice_of` makes."""
    if not reach.long_range:
        return math.prod(side + reach.margin for side in sides)
    radius = math.hypot(*sides) + reach.margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + reach.margin for side in sides)


def reciprocal_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    sources: Sources, mask: Bool[Tensor, "graphs nodes"] | None, interaction: Interaction, cells: Cells,
    nufft: bool = False, ranks: Ranks | None = None,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    r"""Sums over the nodes of each graph and all their images.

    .. math:: \mathrm{out}_i = \sum_{c, l} q_i^c \cdot \frac{1}{V} \sum_k g_{c l}\, u_c^l\, \hat K_c(k)\,
        e^{i k \cdot x_i} \Big[ \sum_j e^{-i k \cdot x_j}\, k_j^c\, v_j \Big] \otimes Y_l(i k)

    In crystals, kernels share one list of reciprocal vectors, sorted by length, and the sum over each kernel ends at
    its cutoff. Otherwise every kernel has its own vectors. With ``nufft``, sums are non-uniform fast Fourier
    transforms. While tracing with ``max_hkl``, all kernels are computed by one expression, since the time to compile
    grows with the length of a program.
    """
    most, extent, kernels, dtype = pos.shape[1], cells.extents(pos, mask, ranks), interaction.kernels, query.dtype
    if ranks is not None:
        most = int(ranks.largest(torch.tensor([most], device=pos.device)))
    ranges = [reach for kernel in kernels for reach in kernel.ranges(interaction.scaled_cutoff)]
    shared = interaction.max_hkl is None and is_readable(cells.periodic) and bool(cells.periodic.all())
    lattice = lattice_of(cells, pos, extent, ranges, dtype, interaction.hkl_bounds(ranges), shared)
    counts, key = lattice.counts, sources[0]
    weights = (lattice.weights[..., None, None] * _transforms(kernels, lattice)).to(dtype)  # B, D, H, L
    harmonics = solid_harmonics(lattice.wavevectors, interaction.lmax).to(dtype)
    each: Sequence[Tensor] = weights.split(counts, 1)
    if shared and counts != sorted(counts, reverse=True):
        order = sorted(range(len(counts)), key=lambda c: -counts[c])
        index = torch.tensor(order, device=pos.device)
        query, key, each = query.index_select(3, index), key.index_select(3, index), [each[c] for c in order]
        counts = [counts[c] for c in order]
    if len(sources) == 2:
        source = torch.einsum("bnhca,bnhv->bncahv", key, sources[1])
    else:
        source = key.transpose(2, 3)[:, :, :, None]
    angles, mix, out, last = lattice.angles, (interaction.product, ranks), [], 0
    if is_whole(pos) and interaction.max_hkl is not None:  # one expression, which compilers take less time for
        operands = lattice.numbers, harmonics, source.movedim(2, 0)[:, :, :, None], weights[:, :, None]
        sums = _tile(mix, counts, angles, *operands)[:, :, :, 0]
        return torch.einsum("cbnahe,bnhca->bnhe", sums, query)
    # kernels with equal vectors are computed together
    groups = [len([*same]) for _, same in itertools.groupby(counts)] if shared else [1] * len(counts)
    ends, queries = itertools.accumulate(groups), query.split(groups, 3)
    for end, columns, own_query in zip(ends, source.split(groups, 2), queries, strict=True):
        weight = torch.stack(list(each[end - columns.shape[2] : end]), 2)  # B, D, C, H, L
        start = 0 if shared else last
        last = start + weight.shape[1]
        operands = lattice.numbers[:, start:last], harmonics[:, start:last], columns, weight
        if nufft:
            sums = _by_nufft(mix, angles, *operands, lattice.ratio[:, end - 1, None], interaction.error)
        else:
            sums = _by_products(mix, angles, *operands, most)
        out.append(torch.einsum("bncahe,bnhca->bnhe", sums, own_query))
    return sum(out[1:], out[0])


def _transforms(kernels: Sequence[Kernel], lattice: Lattice) -> Float[Tensor, "graphs terms heads degrees"]:
    """Fourier transforms of kernels at their reciprocal vectors."""
    out, first, start = [], 0, 0
    for kernel in kernels:
        last = first + kernel.count
        end = start + sum(lattice.counts[first:last])
        waves = lattice.square[:, start:end], lattice.coulomb[:, start:end], lattice.kernel[start:end] - first
        out.append(kernel.reciprocal(*waves))
        first, start = last, end
    return joined(out, 1)


def _mixed(
    mix: Mix, sums: Float[Tensor, "graphs 2 vectors kernels contracted heads channels"],
    weights: Float[Tensor, "graphs vectors kernels heads degrees"],
    harmonics: Float[Tensor, "graphs vectors harmonics"],
) -> Float[Tensor, "graphs 2 vectors kernels contracted heads out"]:  # fmt: skip
    """Products of sums over nodes (of cosines, then of sines) of all ranks with weights times Y_l(i k), which is
    i^l Y_l(k)."""
    (product, ranks), out = mix, []
    sums = sums if ranks is None else ranks.sum(sums)
    for degree in range(weights.shape[4]):
        weight = weights[:, :, :, None, :, degree, None]  # B, D, C, 1, H, 1
        signs = ((1, 1), (1, -1), (-1, -1), (-1, 1))[degree % 4]
        scaled = (sums.flip(1) if degree % 2 else sums) * torch.stack([sign * weight for sign in signs], 1)
        out.append(product(scaled, harmonics[:, None, :, None, None, None, degree**2 : (degree + 1) ** 2], degree))
    return sum(out[1:], out[0])


def _by_nufft(
    mix: Mix, angles: Tensor, numbers: Tensor, harmonics: Tensor, source: Tensor, weights: Tensor, ratio: Tensor,
    error: float,
) -> Tensor:  # fmt: skip
    """Sums of kernels with one box by non-uniform fast Fourier transforms, which backward does not compute a second
    time. ``ratio`` is that of the box of the first kernel to this box."""
    angles, indices = angles * ratio.to(angles.dtype), (numbers / ratio).round().long()
    sums = sums_over_nodes(angles, indices, source.flatten(2), error).unflatten(3, source.shape[2:])
    table = recomputed(_mixed, mix, sums, weights, harmonics)
    return sums_at_nodes(angles, indices, table.flatten(3), error).unflatten(2, table.shape[3:])


def _by_products(
    mix: Mix, angles: Tensor, numbers: Tensor, harmonics: Tensor, source: Tensor, weights: Tensor, most: int
) -> Tensor:
    """Sums of kernels with one list of vectors by matrix products, in tiles of vectors, which backward computes a
    second time.

    Ranks add up their sums in each tile, so all ranks need the same number of tiles. It follows from ``most``, the
    largest number of nodes of a rank.
    """
    each = max(1, angles.shape[0] * max(2 * most, 4 * source.shape[2:].numel()))
    step = max(1, tile_numbers(angles.device, _VECTORS, 4) // each)
    if is_whole(angles) or numbers.shape[1] <= step:
        return _tile(mix, None, angles, numbers, harmonics, source[None], weights)[0]
    tiles = zip(*(x.split(step, 1) for x in (numbers, harmonics, weights)), strict=True)
    sums = (recomputed(_tile, mix, None, angles, n, y, source[None], w)[0] for n, y, w in tiles)
    return sum(sums, source.new_zeros(()))


def _tile(
    mix: Mix, counts: Sequence[int] | None, angles: Tensor, numbers: Tensor, harmonics: Tensor, sources: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """Sums at nodes (P, B, N, C, A, H, E) of sources (P, B, N, C, A, H, V). Each of P sources has a list of reciprocal
    vectors, and the lists stand one after the other, as long as ``counts`` says; ``None`` means one list."""
    steps = numbers.to(angles.dtype)  # no matrix product, as TF32 would round phases
    phases = angles[:, :, None, 0] * steps[:, None, :, 0]
    for axis in (1, 2):
        phases = torch.addcmul(phases, angles[:, :, None, axis], steps[:, None, :, axis])
    each = [[x] if counts is None else x.split(list(counts), 2) for x in (phases.cos(), phases.sin())]  # B, N, D
    waves = list(zip(*each, sources.flatten(3).unbind(0), strict=True))
    sums = joined([torch.stack([cos.mT @ source, sin.mT @ source], 1) for cos, sin, source in waves], 2)
    table = _mixed(mix, sums.unflatten(3, sources.shape[3:]), weights, harmonics)
    tables = [table] if counts is None else table.split(list(counts), 2)
    rows = [x.flatten(3).unbind(1) for x in tables]
    out = [torch.baddbmm(cos @ x, sin, y) for (cos, sin, _), (x, y) in zip(waves, rows, strict=True)]
    return joined([x[None] for x in out]).unflatten(3, table.shape[3:])
