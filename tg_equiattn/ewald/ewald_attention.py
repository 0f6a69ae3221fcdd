"""Attention of nodes in open graphs, slabs and crystals through Gaussian and Coulomb kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from .. import checks
from ..graphs.node_batch import NodeBatch
from ..operators import tile_numbers
from ..shapes import Float
from ..tiles import recomputed
from ..torch_state import full_precision, is_fused, is_readable, is_transformed, is_whole
from .cells import Cells, cells_of
from .harmonics import solid_harmonics
from .kernels import Coulomb, Interaction, Kernel, Product, Sources
from .reciprocal import MANY, Choice, Images, Term, choices_of, few, reciprocal_sums

# annotations of arguments
Method = Literal["auto", "direct", "ewald", "nufft"]
Error = Annotated[float, checks.Kind("in [1e-14, 0.1]", lambda x: isinstance(x, float) and 1e-14 <= x <= 0.1)]

MillerIndices = tuple[checks.Count, checks.Count, checks.Count]  # along each lattice vector
_FEW_NODES = 15  # graphs up to this size are padded to one length: another group takes longer than the padding
_PAIRS = 1 << 21  # pairs times kernels of a tile on a CPU


def ewald_attention(
    pos: Tensor, query: Tensor, sources: Sources, interaction: Interaction, node_batch: NodeBatch,
    cells: Cells | None, method: str,
) -> Tensor:  # fmt: skip
    r"""Attention of nodes in space, weighted by kernels K of their offsets and derivatives of these kernels.

    .. math:: \mathrm{out}_i = \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        v_j \otimes u_c^l\, Y_l(\nabla) K_c(x_i - x_j)

    Y are solid harmonics; the product of values and harmonics is that of the interaction. The sum includes the node
    itself and, in graphs that repeat, all images of each node. In crystals Coulomb kernels leave out k = 0: a uniform
    background makes every cell neutral. Queries are (T, heads, C, A) for the C kernels of all kinds, and the result is
    (T, heads, E).

    Source: Ewald 1921; attention in linear time by plane waves, Frank et al. (arXiv 2412.08541); in crystals, Kosmala
    et al. (arXiv 2303.04791); truncated potentials, Vico, Greengard and Ferrando 2016.
    """
    narrowest, _ = min([min(kernel.bounds) for kernel in interaction.kernels])
    checks.exact_positions(node_batch.zero_padding(pos.detach()), width=narrowest)
    nodes = node_batch.centred(pos), query, *sources
    sized = cells is None or interaction.max_hkl is not None  # then nothing has to be read, and CUDA need not wait
    unread = sized and node_batch.known_sizes is None
    if unread or not is_readable(pos, wait=True) or not (cells is None or is_readable(cells.vectors, wait=True)):
        return _without_reading(nodes, interaction, node_batch, cells, method)
    groups = _choose(method, nodes[0], interaction, node_batch, cells)
    if not groups:
        features = query.new_zeros(*query.shape[:2], sources[-1].shape[-1])
        return interaction.product([(features, query.new_zeros(1, 2 * n + 1)) for n in range(interaction.lmax + 1)])
    return node_batch.mix(functools.partial(_sums, interaction, cells), *nodes, groups=groups)


def _choose(
    method: str, pos: Float[Tensor, "nodes 3"], interaction: Interaction, node_batch: NodeBatch, cells: Cells | None
) -> dict[Choice, list[int]]:
    """Choose the method of each graph. Return the graphs of each choice; empty graphs are left out."""
    repeats = [False] * node_batch.count if cells is None else cells.periodic.any(1).tolist()
    if method == "direct" and any(repeats):
        raise ValueError("method must be 'auto', 'ewald' or 'nufft' for graphs that repeat, got 'direct'")
    sizes = dict(enumerate(node_batch.read_sizes()))
    choices = {
        graph: Choice("direct") for graph, size in sizes.items()
        if method == "direct" or (method == "auto" and not repeats[graph] and size < MANY)
    }  # fmt: skip
    if others := {graph: size for graph, size in sizes.items() if size and graph not in choices}:
        choices |= choices_of(method, others, pos, interaction, node_batch, cells)
    chosen: dict[Choice, list[int]] = {}
    for graph, size in sizes.items():
        if size:
            chosen.setdefault(choices[graph]._replace(nodes=max(size, _FEW_NODES).bit_length()), []).append(graph)
    return chosen


def _sums(interaction: Interaction, cells: Cells | None, pos: Tensor, query: Tensor, *others: Any) -> Tensor:
    """Sums (b, n, heads, E) over some graphs by one method. The last of the ``others`` beside sources are the rows of
    the graphs, whose key is the :class:`Choice`."""
    *sources, rows = others
    choice = rows.key
    if choice.method == "direct":
        return direct_sums(pos, query, tuple(sources), interaction)
    cells = (cells or Cells.none(rows.node_batch.count, pos.device)).select(rows.graph)
    terms = () if interaction.max_hkl else choice.terms
    nufft = {"nufft": 0, "mixed": few(choice.nodes)}.get(choice.method, math.inf)
    groups: dict[Images | None, tuple[list[int], list[Kernel]]] = {}
    for columns, kernel, images in _parts(interaction.kernels, terms):
        group = groups.setdefault(images, ([], []))
        group[0].extend(columns)
        group[1].append(kernel)
    out = []
    for images, (columns, kernels) in groups.items():
        part, queries, key = interaction._replace(kernels=tuple(kernels)), query, sources[0]
        if columns != list(range(query.shape[3])):
            index = torch.tensor(columns, device=pos.device)
            queries, key = query.index_select(3, index), key.index_select(3, index)
        operands = pos, queries, (key, *sources[1:])
        if images is None:
            out.append(reciprocal_sums(*operands, rows.mask, part, cells, nufft))
        else:
            out.append(direct_sums(*operands, part, cells, images))
    return sum(out[1:], out[0])


def _parts(kernels: Sequence[Kernel], terms: Sequence[Term]) -> Iterator[tuple[list[int], Kernel, Images | None]]:
    """Yield kernels that are summed in the same way, or parts of them, with their indices among all kernels, and the
    images over which they are summed in real space."""
    first = 0
    for kernel in kernels:
        alike: dict[Term, list[int]] = {}
        for c in range(kernel.count):
            alike.setdefault(terms[first + c] if terms else Term(), []).append(c)
        for term, columns in alike.items():
            chosen = kernel if len(columns) == kernel.count else kernel.select(columns)
            for part in (
                chosen.split(term.width) if isinstance(chosen, Coulomb) and term.width is not None else (chosen,)
            ):
                yield [first + c for c in columns], part, None if part.long_range else term.images
        first += kernel.count


def _without_reading(
    nodes: Sequence[Tensor], interaction: Interaction, node_batch: NodeBatch, cells: Cells | None, method: str
) -> Tensor:
    """Sums over all graphs in one group. If some graphs may repeat and others not, both methods are computed."""
    if method == "nufft":
        raise ValueError("method must not be 'nufft' while a model is traced or mapped over")
    if method == "direct" and cells is not None:
        raise ValueError("method must be 'auto' or 'ewald' with cell, got 'direct'")

    def sums_by(method: str, cells: Cells | None) -> Tensor:
        parts = node_batch.padded(Choice(method))
        packed = [parts.pack(x)[0] for x in nodes]
        return parts.unpack([_sums(interaction, cells, *packed, *parts.rows)])  # type: ignore[misc]

    if cells is None and method != "ewald":
        return sums_by("direct", None)
    if interaction.max_hkl is None:
        raise ValueError("max_hkl must be given with cell while a model is traced or mapped over, got None")
    if method == "ewald" or cells is None:
        return sums_by("ewald", cells)
    repeats = cells.periodic.any(1)
    small = Cells(cells.vectors, cells.periodic | ~repeats[:, None])  # in open graphs, where the result is not used
    return torch.where(node_batch.spread(repeats)[:, None, None], sums_by("ewald", small), sums_by("direct", None))


def direct_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    sources: Sources, interaction: Interaction, cells: Cells | None = None, images: Images | None = None,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    """Sums over pairs, in tiles of graphs or of queries, which backward computes a second time.

    They are exact without ``images``. In crystals they run over the nearest image of each node and the ``images``
    around it, so many to either side along each lattice vector.
    """
    (graphs, count), settings, nodes = pos.shape[:2], (interaction.kernels, interaction.product, images), sources
    row = max(1, count * query.shape[2] * query.shape[3])
    if cells is None or images is None:
        pos = pos.to(query.dtype)
    else:
        nodes = cells.vectors, *sources
        row *= math.prod(2 * n + 1 for n in images)
    if is_whole(pos) and (is_transformed() or not is_fused(pos.device)):
        return _tile(*settings, pos, query, pos, *nodes)
    limit = tile_numbers(pos.device, _PAIRS, 8)
    some_graphs, some_nodes = max(1, limit // max(1, row * count)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= count:
        return _tile(*settings, pos, query, pos, *nodes)
    out = []
    for tile in zip(*(x.split(some_graphs) for x in (pos, query, *nodes)), strict=True):
        queries = zip(*(x.split(some_nodes, 1) for x in tile[:2]), strict=True)
        sums = [recomputed(_tile, *settings, *part, tile[0], *tile[2:]) for part in queries]
        out.append(torch.cat(sums, 1))
    return torch.cat(out)


def _tile(
    kernels: tuple[Kernel, ...], product: Product, images: Images | None, pos_i: Tensor, query: Tensor, pos: Tensor,
    *sources: Tensor,
) -> Tensor:  # fmt: skip
    """Sums (B, n, heads, E) over all nodes of each graph, for queries at ``pos_i`` (B, n, 3). With ``images``, lattice
    vectors (B, 3, 3) come before the sources."""
    # 3, B, n, N; gradients of coordinates taken apart are contiguous, as hosts expect of forces
    offsets = torch.stack([a[:, :, None] - b[:, None] for a, b in zip(pos_i.unbind(2), pos.unbind(2), strict=True)])
    copies = 1
    if images is not None:
        offsets, sources = _to_images(offsets, sources[0], images, query.dtype), sources[1:]
        copies = offsets.shape[3] // pos.shape[1]
    square = offsets.square().sum(0)
    harmonics = solid_harmonics(offsets, kernels[0].lmax, 0)
    if len(sources) == 2 and query.shape[2] > 1 == query.shape[4] and all(len(x.widths) == 1 for x in kernels):
        return product(_shared(kernels, square, harmonics, query[..., 0], sources[0][..., 0], sources[1]))
    query, values = query.permute(0, 2, 3, 1, 4), sources[-1].movedim(1, -2)  # B, H, C, n, A and B, H, (C,) N, V
    scores = query  # B, H, C, n, N or 1
    if len(sources) == 2:
        key = sources[0].permute(0, 2, 3, 4, 1)
        # matrix products with one term are slow, and results would have the layout of the factors
        scores = query.contiguous() * key.contiguous() if query.shape[-1] == 1 else query @ key
    scores = scores.repeat_interleave(copies, -1) if len(sources) == 2 and copies > 1 else scores
    each = [*zip(kernels, scores.split([kernel.count for kernel in kernels], 2), strict=True)]
    if len(sources) == 2:  # one value for all kernels
        joint, values = [_joined(kernel, x, square)[:, :, :, None] for kernel, x in each], values[:, :, None]
        weights = sum(joint[1:], joint[0])
    else:
        weights = torch.cat([kernel.real_space(square) * x for kernel, x in each], 3)
    parts = []
    for degree, weight in enumerate(weights.unsqueeze(4)):  # B, H, C or 1, 1, n, N
        if degree:
            ys = harmonics[degree**2 : (degree + 1) ** 2].movedim(0, 1)  # B, 2 l + 1, n, N
            weight = weight * ys[:, None, None]
        weight = weight if copies == 1 else weight.unflatten(-1, (-1, copies)).sum(-1)
        sums = (weight @ values[:, :, :, None]).sum(2)  # B, H, 2 l + 1, n, V
        parts.append((sums.permute(0, 3, 1, 2, 4), None))
    return product(parts)


def _to_images(
    offsets: Float[Tensor, "3 graphs queries nodes"], lattice: Float[Tensor, "graphs 3 3"], images: Images,
    dtype: torch.dtype,
) -> Float[Tensor, "3 graphs queries copies"]:  # fmt: skip
    """Offsets to the images of each node, in double precision until they are short."""
    inverse = torch.linalg.inv(lattice.detach())
    nearest = torch.einsum("xbij,bxa->abij", offsets.detach(), inverse).round()
    offsets = (offsets - torch.einsum("abij,bax->xbij", nearest, lattice)).to(dtype)
    steps = torch.cartesian_prod(*(torch.arange(-n, n + 1.0, device=lattice.device) for n in images))
    around = (steps.to(lattice.dtype) @ lattice).to(dtype)  # B, copies, 3
    return (offsets[..., None] + around.permute(2, 0, 1)[:, :, None, None]).flatten(3)


def _shared(
    kernels: tuple[Kernel, ...], square: Float[Tensor, "graphs queries copies"],
    harmonics: Float[Tensor, "harmonics graphs queries copies"], query: Float[Tensor, "graphs queries heads kernels"],
    key: Float[Tensor, "graphs nodes heads kernels"], value: Float[Tensor, "graphs nodes heads channels"],
) -> list[tuple[Tensor, None]]:  # fmt: skip
    """Sums over nodes of kernels that several heads share, by matrix products of each kernel, before queries weight
    them. Scores of a kernel are products of two numbers."""
    sources = torch.einsum("bnhc,bnhv->bcnhv", key, value).flatten(3)
    each = [kernel.radial(square)[:, :, 0] for kernel in kernels]  # 1 or lmax + 1, B, C, n, copies
    radial = torch.cat([x.expand(kernels[0].lmax + 1, -1, -1, -1, -1) for x in each], 2)
    scales, parts = torch.cat([kernel.scales(square.dtype) for kernel in kernels], 2), []
    for degree, (weight, scale) in enumerate(zip(radial.unsqueeze(3), scales, strict=True)):
        if degree:
            weight = weight * harmonics[degree**2 : (degree + 1) ** 2].movedim(0, 1)[:, None]
        if square.shape[2] > value.shape[1]:
            weight = weight.unflatten(-1, (value.shape[1], -1)).sum(-1)
        sums = weight.flatten(2, 3) @ sources  # B, C, (2 l + 1) n, H V
        sums = sums.unflatten(2, weight.shape[2:4]).unflatten(-1, value.shape[2:])
        parts.append((torch.einsum("bcmnhv,bnhc->bnhmv", sums, query * scale), None))
    return parts


def _joined(kernel: Kernel, scores: Tensor, square: Tensor) -> Tensor:
    """Sums (lmax + 1, B, H, n, N) over the kernels of scores (B, H, C, n, N) times R_l(r)."""
    weights, scales = kernel.radial(square) * scores, kernel.scales(square.dtype)
    if len(weights) == 1:
        sums = (scales.transpose(0, 1) @ weights[0].flatten(-2)).movedim(2, 0)
    else:
        sums = (scales[:, None, :, None] @ weights.flatten(-2)).squeeze(-2)
    return sums.unflatten(-1, square.shape[-2:])


def own_terms(
    query: Float[Tensor, "nodes heads kernels contracted"], sources: Sources, interaction: Interaction
) -> Float[Tensor, "nodes heads out"]:
    """The terms j = i of the sums: the attention of each node to itself, but not to its images."""
    zero = query.new_zeros(1, 1, 1)
    at_zero = torch.cat([kernel.real_space(zero)[0, 0, :, :, 0] for kernel in interaction.kernels], 1)  # H, C, 1
    weights, value = query * at_zero, sources[-1]
    pairs = len(sources) == 2
    features = (weights * sources[0]).sum((2, 3))[..., None] * value if pairs else (weights * value).sum(2)
    return interaction.product([(features, features.new_ones(1, 1))])


@checks.arguments
def charge_energies(
    charges: Tensor, pos: Tensor, batch: Tensor | None = None, *, width: checks.Positive, cell: Tensor | None = None,
    pbc: Tensor | None = None, method: Method = "auto", error: Error = 1e-4, max_hkl: MillerIndices | None = None,
    batch_size: int | None = None, max_num_nodes: int | None = None,
) -> Tensor:  # fmt: skip
    r"""Energies of nodes with charges q, in units of charge² / length. The energy of a graph is their sum.

    .. math:: E_i = \frac{q_i}{2} \sum_j q_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}

    The sum includes the node itself, with :math:`q_i^2 / \sqrt{2 \pi} s`, and, in graphs that repeat, all images of
    each node. So the energy of a graph is a sum of squares over waves and never negative, except in slabs whose charges
    do not sum to zero. In crystals k = 0 is left out: a uniform background makes every cell neutral, and the surface
    term of a dipole is left out too. The energy of a charged cell therefore depends on its volume by a term that decays
    as 1 / L with its side L.

    Args:
        charges: Charges ``(T,)``.
        pos: Positions ``(T, 3)``. Give large coordinates in float64, whatever the dtype of the charges is.
        batch: Sorted int64 ``(T,)``, the graph of each node. ``None`` means one graph.
        width: Width s of the kernel, in the unit of positions. At distances beyond 3 s it is 1 / r to 0.3 %.
        cell: Lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``, in the unit of positions.
        pbc: bool ``(3,)`` or ``(B, 3)``, the lattice vectors along which graphs repeat: three, two or none. ``None``
            means all that are not zero.
        method: ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in :class:`tg_equiattn.nn.EwaldAttention`.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of the kernel.
        max_hkl: Largest Miller indices along the three lattice vectors. If given, cells are not read, which
            torch.compile needs.
        batch_size: Number of graphs. ``None`` reads it from ``batch``, which torch.compile cannot.
        max_num_nodes: Bound of the number of nodes of a graph. ``None`` reads it from ``batch``.

    Returns:
        ``(T,)``, in float32 for charges in half precision.

    Raises:
        ValueError: if an argument has another shape, dtype or device than stated, if the method cannot be used for
            these graphs, or if ``max_hkl`` is too small for a cell.

    Source: Ewald 1921.

    Example:
        >>> import torch
        >>> pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 100.0]])
        >>> own = 2 / (2 * torch.pi) ** 0.5  # of the two nodes themselves
        >>> charge_energies(torch.tensor([1.0, -1.0]), pos, width=1.0).sum() - own
        tensor(-0.0100)
    """
    if charges.ndim != 1 or not charges.is_floating_point():
        raise ValueError(f"charges must be floating point of shape (nodes,), got {checks.described(charges)}")
    pos = checks.positions(pos, (charges.shape[0], 3), charges, "energies depend on them")
    node_batch = NodeBatch.flat(charges, batch, batch_size, max_num_nodes)
    cells = cells_of(cell, pbc, node_batch.count, charges)
    with full_precision(charges.device):
        charges = charges.to(torch.promote_types(charges.dtype, torch.float32))
        return energies_of_nodes(charges, pos, node_batch, cells, width, method, error, max_hkl)


def energies_of_nodes(
    charges: Float[Tensor, " nodes"], pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch, cells: Cells | None,
    width: float, method: str, error: float, max_hkl: Sequence[int] | None,
) -> Float[Tensor, " nodes"]:  # fmt: skip
    """:func:`charge_energies` of checked arguments."""
    unit = charges.new_ones(1, 1)
    kernel = Coulomb(width * unit, 0.5 / width * unit[..., None], bounds=((float(width), float(width)),))
    interaction, source = Interaction((kernel,), Product(_values, ()), error, max_hkl), charges[:, None, None, None]
    potentials = ewald_attention(pos, torch.ones_like(source), (source,), interaction, node_batch, cells, method)
    return charges * potentials[:, 0, 0]


def _values(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Float[Tensor, "*shape channels"]:
    """Products with harmonics of degree 0."""
    ((features, harmonics),) = parts
    return features.squeeze(-2) if harmonics is None else features * harmonics
