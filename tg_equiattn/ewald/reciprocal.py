"""Ewald attention by sums over reciprocal vectors of a cell, or of a box along directions that do not repeat, and the
choice of the method for each graph and kernel, by the numbers of nodes and of vectors."""

from __future__ import annotations

import functools
import importlib
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graphs.node_batch import NodeBatch
from ..operators import tile_numbers
from ..shapes import Bool, Float, Int, Shaped
from ..tiles import joined, recomputed
from ..torch_state import is_eager, is_whole
from .cells import TAPER, Cells, count_of_vectors, lattice_of
from .kernels import Coulomb, Interaction, Product, Range, Sources

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
    two grids is used if it is accurate enough and there are more modes than nodes; some releases of cufinufft do not
    have it.
    """
    device, single = data.device, data.dtype == torch.complex64
    tolerance = max(error / 3, 3e-5 if single else 1e-13)
    if device.type == "cpu":
        upsampling = 1.25 if tolerance > 1e-8 and math.prod(sides) > len(angles) else 2.0
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


_VECTORS = 1 << 23  # numbers in the largest tensor of a tile of reciprocal vectors on a CPU
MANY = 4000  # open graphs with fewer nodes are summed directly
_WIDE = 1000  # reciprocal vectors per node; with more, a cell is far wider than the graph in it
_WARNED = 30_000  # reciprocal vectors from which on wide cells get a warning
_CALL = 10_000
Images = tuple[int, int, int]


def few(digits: int) -> int:
    """Reciprocal vectors of a kernel up to which matrix products are faster than non-uniform transforms, for numbers of
    nodes with so many binary digits."""
    return 4000 if digits < 14 else 2000


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
        method: the method. ``"mixed"`` is ``"nufft"`` for kernels with many reciprocal vectors.
        terms: how each kernel is summed.
        vectors: number of binary digits of the number of reciprocal vectors.
        nodes: number of binary digits of the number of nodes.
    """

    method: str
    terms: tuple[Term, ...] = ()
    vectors: int = 0
    nodes: int = 0


def choices_of(
    method: str, sizes: Mapping[int, int], pos: Tensor, interaction: Interaction, node_batch: NodeBatch,
    cells: Cells | None,
) -> dict[int, Choice]:  # fmt: skip
    """Choose the method of graphs with these ``sizes``. The rule of ``"auto"`` follows from measured times on one core
    of a CPU."""
    nufft = nufft_available(pos.device.type) and is_eager()
    if method == "nufft" and not nufft:
        raise ValueError(
            "method='nufft' needs finufft (the extra nufft) on a CPU, cufinufft (the extra nufft-cuda) on CUDA, and "
            "no torch.func around it"
        )
    auto, choices = method == "auto", {}
    each = Cells.none(node_batch.count, pos.device) if cells is None else cells
    full = torch.where(each.periodic[..., None], each.vectors, each.normals()).detach()
    volumes, planes = full.det().abs().tolist(), (1 / torch.linalg.inv(full).norm(dim=1)).tolist()
    for graph, size in sizes.items():
        repeats, sides = each.periodic[graph], []
        if not (crystal := bool(repeats.all())):
            start, graphs = int(node_batch.starts[graph]), torch.tensor([graph], device=pos.device)
            points = pos.detach()[None, start : start + int(node_batch.sizes[graph])]
            sides = each.select(graphs).extents(points, None)[0][~repeats].tolist()
        by_images = auto and crystal and interaction.max_hkl is None
        extents = _Extents(volumes[graph], sides, planes[graph])
        terms, vectors = _terms(extents, interaction, size if by_images else None)
        most, is_open = max([1.0, *vectors]), len(sides) == 3
        if not is_open and sum(vectors) > max(_WARNED, _WIDE * size):
            warnings.warn(
                f"cell of graph {graph} is far wider than its {size} nodes and needs {sum(vectors):,.0f} reciprocal "
                "vectors: say with pbc=False along which lattice vectors it does not repeat, or take a larger width",
                stacklevel=2,
            )
        if auto and is_open and (not nufft or size < MANY or size**2 < 1250 * most):
            choices[graph] = Choice("direct")
            continue
        automatic = "mixed" if nufft and size > 2000 and most > few(size.bit_length()) else "ewald"
        choices[graph] = Choice(automatic if auto else method, terms, int(most).bit_length())
    return choices


class _Extents(NamedTuple):
    """The volume of a cell along directions that repeat, and the extents along the others: the volume and no sides for
    a crystal, the area and the thickness for a slab, volume 1 and three side lengths for an open graph. ``planes`` are
    the distances between lattice planes."""

    volume: float
    sides: list[float]
    planes: list[float]


def _terms(extents: _Extents, interaction: Interaction, nodes: int | None) -> tuple[tuple[Term, ...], list[float]]:
    """The form of the sum over each kernel, and the number of reciprocal vectors of each part of a kernel.

    In crystals of so many ``nodes``, a kernel or its short-range part is summed over the images within its margin if
    there are fewer pairs of these images than its reciprocal vectors are worth: a vector takes about as long as 20
    pairs, and as a tenth of a pair for each node, and the sum by itself as ``_CALL`` pairs. Widths follow from cells
    and not from positions.
    """
    scaled, is_open, terms, counts = interaction.scaled_cutoff, len(extents.sides) == 3, [], []
    plane = min(extents.planes)

    def vectors(part: Range) -> float:
        return count_of_vectors(extents.volume * _box(extents.sides, part), TAPER * part.cutoff)

    for kernel in interaction.kernels:
        coulomb = isinstance(kernel, Coulomb)
        for (low, high), whole in zip(kernel.bounds, kernel.ranges(scaled), strict=True):
            term, parts = Term(), [vectors(whole)]
            if coulomb and is_open:
                options = [high * 2 ** (n / 2) for n in range(20)]
                splits = {width: [*map(vectors, Coulomb.split_ranges(low, width, scaled))] for width in options}
                width = min(splits, key=lambda width: sum(splits[width]))
                term, parts = Term(width), splits[width]
            elif nodes is not None and (coulomb or not whole.long_range):
                width, rest = None, []
                if coulomb:  # the smallest width above its own whose images are used up to half a plane distance
                    width = (math.floor(scaled * high / plane + 0.5) + 0.5) * plane / scaled
                    rest = [vectors(Coulomb.split_ranges(low, width, scaled)[1])]
                images = _images(whole.margin if width is None else scaled * width, extents)
                pairs = nodes**2 * math.prod([2 * n + 1 for n in images])
                if pairs + _CALL < (parts[0] - sum(rest)) * (20 + nodes / 10):
                    term, parts = Term(width, images), rest
            terms.append(term)
            counts += parts
    return tuple(terms), counts


def _images(margin: float, extents: _Extents) -> Images:
    """Images around the nearest one within a margin, in a cell with these distances between lattice planes."""
    a, b, c = [max(0, math.ceil(margin / distance - 0.5)) for distance in extents.planes]
    return a, b, c


def _box(sides: list[float], reach: Range) -> float:
    """The volume, or for slabs the thickness, of the box that :func:`.cells.lattice_of` makes."""
    if not reach.long_range:
        return math.prod([side + reach.margin for side in sides])
    radius = math.hypot(*sides) + reach.margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod([side + radius + reach.margin for side in sides])


def reciprocal_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    sources: Sources, mask: Bool[Tensor, "graphs nodes"] | None, interaction: Interaction, cells: Cells,
    nufft: float = math.inf,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    r"""Sums over the nodes of each graph and all their images.

    .. math:: \mathrm{out}_i = \sum_{c, l} q_i^c \cdot \frac{1}{V} \sum_k g_{c l}\, u_c^l\, \hat K_c(k)\,
        e^{i k \cdot x_i} \Big[ \sum_j e^{-i k \cdot x_j}\, k_j^c\, v_j \Big] \otimes Y_l(i k)

    Kernels with more than ``nufft`` vectors are summed by non-uniform fast Fourier transforms, which backward does not
    compute a second time. The others are summed by matrix products, in tiles of vectors, which it does.
    """
    most, extent, dtype = pos.shape[1], cells.extents(pos, mask), query.dtype
    lattice = lattice_of(cells, pos, extent, interaction)
    angles, spans, key = lattice.angles.to(dtype), lattice.spans, sources[0]
    each = lattice.weights.to(dtype).split([end - start for start, end in spans], 1)  # B, D, H, Y
    groups: dict[tuple[int, int], list[int]] = {}  # kernels with equal vectors
    for c, span in enumerate(spans):
        groups.setdefault(span, []).append(c)
    order = [c for group in groups.values() for c in group]
    if order != sorted(order):
        index = torch.tensor(order, device=pos.device)
        query, key = query.index_select(3, index), key.index_select(3, index)
    if len(sources) == 2:  # B, N, C, A, H, V
        source = key.permute(0, 1, 3, 4, 2)[..., None].contiguous() * sources[1][:, :, None, None]
    else:
        source = key.transpose(2, 3)[:, :, :, None]
    weights = [torch.stack([each[c] for c in group], 2) for group in groups.values()]  # B, D, C, H, Y
    numbers, counts = [lattice.numbers[:, slice(*span)] for span in groups], [len(group) for group in groups.values()]
    operands = list(zip(numbers, query.split(counts, 3), source.split(counts, 2), weights, strict=True))
    product, out = interaction.product, []
    if is_whole(angles):
        return _tile(product, angles, *zip(*operands, strict=True))
    for group, (steps, own, x, w) in zip(groups.values(), operands, strict=True):
        if steps.shape[1] > nufft:
            ratio = lattice.ratio[:, group[0], None]
            at, indices = angles * ratio.to(dtype), (steps / ratio).round().long()
            sums = sums_over_nodes(at, indices, x.flatten(2), interaction.error)
            table = recomputed(_mixed, product, sums.unflatten(3, x.shape[2:]).flatten(2, 3), w.flatten(1, 2))
            table = table.unflatten(2, w.shape[1:3])
            sums = sums_at_nodes(at, indices, table.flatten(3), interaction.error).unflatten(2, table.shape[3:])
            out.append(torch.einsum("bncahe,bnhca->bnhe", sums, own))
    operands = [each for each in operands if each[0].shape[1] <= nufft]
    if not operands:
        return sum(out[1:], out[0])
    longest = max(x.shape[1] for x, *_ in operands)
    channels = 4 * source[0, 0, 0].numel() * sum(w.shape[1] * w.shape[2] for *_, w in operands) // longest
    step = max(1, tile_numbers(pos.device, _VECTORS, 4) // (len(angles) * max(2 * most, channels)))
    if not out and step >= longest:
        return _tile(product, angles, *zip(*operands, strict=True))
    for tile in (slice(first, first + step) for first in range(0, longest, step)):
        some = [(k[:, tile], own, x, w[:, tile]) for k, own, x, w in operands if k.shape[1] > tile.start]
        out.append(recomputed(_tile, product, angles, *zip(*some, strict=True)))
    return sum(out[1:], out[0])


def _mixed(
    product: Product, sums: Float[Tensor, "graphs 2 terms contracted heads channels"],
    weights: Float[Tensor, "graphs terms heads harmonics"],
) -> Float[Tensor, "graphs 2 terms contracted heads out"]:  # fmt: skip
    """Products of sums over nodes (of cosines, then of sines) with weights times Y_l(i k), which is
    i^l Y_l(k)."""
    parts = []
    for degree in range(math.isqrt(weights.shape[3])):
        harmonics = weights[:, None, :, None, :, degree**2 : (degree + 1) ** 2]
        turned = torch.stack([sums[:, 1], -sums[:, 0]], 1) if degree % 2 else sums  # times i
        parts.append((turned, -harmonics if degree % 4 > 1 else harmonics))
    return product(parts)


def _tile(
    product: Product, angles: Tensor, numbers: Sequence[Tensor], queries: Sequence[Tensor], sources: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    """Sums over some reciprocal vectors. Each group of kernels has numbers (B, D, 3), queries (B, N, H, C, A), sources
    (B, N, C, A, H, V) and weights (B, D, C, H, Y)."""
    waves, sums, out = [], [], []
    for steps, x, w in zip((k.to(angles.dtype).mT for k in numbers), sources, weights, strict=True):
        if angles.device.type == "cpu":
            phases = angles @ steps
        else:  # no matrix product, as TF32 would round phases
            phases = angles[..., :1] * steps[:, None, 0]
            for axis in (1, 2):
                phases = torch.addcmul(phases, angles[..., axis, None], steps[:, None, axis])
        waves.append((phases.cos(), phases.sin()))
        found = torch.stack([wave.mT @ x.flatten(2) for wave in waves[-1]], 1)
        sums.append(found.unflatten(3, (w.shape[2], *x.shape[3:])).flatten(2, 3))
    table = _mixed(product, joined(sums, 2), joined([w.flatten(1, 2) for w in weights], 1))
    tables = table.split([x.shape[2] for x in sums], 2)
    for (cos, sin), x, query, w in zip(waves, tables, queries, weights, strict=True):
        even, odd = x.unflatten(2, w.shape[1:3]).flatten(3).unbind(1)
        found = torch.baddbmm(cos @ even, sin, odd).unflatten(2, (w.shape[2], *table.shape[3:]))
        out.append(torch.einsum("bncahe,bnhca->bnhe", found, query))
    return sum(out[1:], out[0])
