"""Attention of nodes in open graphs, slabs and crystals through Gaussian and Coulomb kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision, is_readable
from ...node_batch import NodeBatch, PaddedBatch
from .cells import Cells, cells_of
from .direct import direct_sums
from .kernel import Interaction, Kernel, Product, Sources
from .methods import METHODS, Choice, check_error, choose
from .reciprocal import reciprocal_sums


def ewald_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos: Tensor,
    kernels: Sequence[Kernel],
    batch: Tensor | None = None,
    *,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    method: str = "auto",
    error: float = 1e-4,
    max_hkl: Sequence[int] | None = None,
    batch_size: int | None = None,
    max_num_nodes: int | None = None,
) -> Tensor:
    r"""Attention of nodes in space, weighted by kernels K of their offsets and derivatives of these kernels.

    .. math:: \mathrm{out}_i = \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        v_j \otimes u_c^l\, Y_l(\nabla) K_c(x_i - x_j)

    Y are solid harmonics; every product of a value and a harmonic is returned. The sum includes the node itself and, in
    graphs that repeat, all images of each node. In crystals Coulomb kernels leave out k = 0: a uniform background
    makes every cell neutral.

    Args:
        query: Queries ``(T, heads, C, A)`` for each of the C kernels of all kinds. Their inner products with keys are
            over A.
        key: Keys ``(T, heads, C, A)``.
        value: Values ``(T, heads, V)``, the features that nodes pass on.
        pos: Positions ``(T, 3)``. Give large coordinates in float64, also if features are in float32.
        kernels: :class:`Kernel` objects: :class:`Gaussian`, :class:`Coulomb` or your own. Together they have the C
            kernels of queries and keys, in this order, and all have the same number of degrees.
        batch: Sorted int64 ``(T,)``, the graph of each node. ``None`` means one graph.
        cell: Lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``, in the unit of positions.
        pbc: bool ``(3,)`` or ``(B, 3)``, the lattice vectors along which graphs repeat. ``None`` means all that are not
            zero.
        method: ``"direct"`` sums over all pairs of nodes, exactly, in graphs that do not repeat. ``"ewald"`` sums over
            reciprocal vectors, of the cell or of a box around an open graph. ``"nufft"`` does so by non-uniform fast
            Fourier transforms, which need the extra ``nufft``. ``"auto"`` chooses for every graph: direct sums below
            4,000 nodes if it is open, reciprocal sums if it repeats, and non-uniform transforms if it is larger. In
            wide cells of crystals it sums what decays fast over pairs and their nearest images.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, from 1e-14 to
            0.1.
        max_hkl: Largest Miller indices along the three lattice vectors, for the kernel with the largest cutoff. If
            given, cells are not read, which torch.compile needs.
        batch_size: Number of graphs. ``None`` reads it from ``batch``, which torch.compile cannot.
        max_num_nodes: Bound of the number of nodes of a graph. ``None`` reads it from ``batch``.

    Returns:
        ``(T, heads, V (lmax + 1)²)``, in float32 for values in half precision.

    Raises:
        ValueError: if an argument has another shape, dtype or device than stated, if the method cannot be used for
            these graphs, or if ``max_hkl`` is too small for a cell.

    Source: Ewald 1921; attention in linear time by plane waves, Frank et al. (arXiv 2412.08541); in crystals, Kosmala
    et al. (arXiv 2303.04791); truncated potentials, Vico, Greengard and Ferrando 2016.

    Example:
        >>> import torch
        >>> from tg_equiattn.functional import Coulomb, Gaussian
        >>> gaussian = Gaussian(torch.ones(1, 1), torch.ones(1, 1, 2), bounds=((0.8, 1.6),))
        >>> coulomb = Coulomb(torch.ones(1, 1), torch.ones(1, 1, 2), bounds=((0.8, 1.6),))
        >>> q, k, v = torch.ones(20, 1, 2, 1), torch.ones(20, 1, 2, 1), torch.randn(20, 1, 5)
        >>> ewald_attention(q, k, v, 4 * torch.rand(20, 3), [gaussian, coulomb]).shape
        torch.Size([20, 1, 20])
    """
    checks.choice("method", method, METHODS)
    checks.alike(4, query=query, key=key)
    kernels = tuple(kernels)
    if not kernels or any(kernel.gains.shape[::2] != kernels[0].gains.shape[::2] for kernel in kernels):
        shapes = [tuple(kernel.gains.shape) for kernel in kernels]
        raise ValueError(f"kernels must have gains (heads, C, lmax + 1) with the same heads and lmax, got {shapes}")
    heads, count = kernels[0].widths.shape[0], sum(kernel.count for kernel in kernels)
    if query.shape[1:3] != (heads, count):
        raise ValueError(f"query must be (T, {heads}, {count}, A) as kernels are, got {tuple(query.shape)}")
    check_error(error)
    if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[:2] != query.shape[:2]:
        raise ValueError(f"value must be ({query.shape[0]}, {heads}, V), got {checks.shape_of(value)}")
    checks.same_kind(value, query, "value")
    pos = checks.positions(pos, (query.shape[0], 3), query, "attention depends on them")
    node_batch = NodeBatch.flat(query, batch, batch_size, max_num_nodes)
    cells = cells_of(cell, pbc, node_batch.count, query)
    interaction = Interaction(kernels, Product(_every_product, (kernels[0].lmax,)), error, max_hkl)
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        return ewald_attention_impl(pos, query, (key, value), interaction, node_batch, cells, method)


def _every_product(features: Tensor, harmonics: Tensor | None, degree: int, lmax: int) -> Tensor:
    """Values times all harmonics up to degree ``lmax``: (..., V) to (..., V (lmax + 1)²)."""
    products = features.mT if harmonics is None else features[..., None] * harmonics[..., None, :]
    return torch.nn.functional.pad(products, (degree**2, (lmax + 1) ** 2 - (degree + 1) ** 2)).flatten(-2)


def ewald_attention_impl(
    pos: Tensor, query: Tensor, sources: Sources, interaction: Interaction, node_batch: NodeBatch,
    cells: Cells | None, method: str,
) -> Tensor:  # fmt: skip
    """:func:`ewald_attention` without checks, with any product of values and harmonics that is linear in both. The
    result is (T, heads, E)."""
    nodes = node_batch.centred(pos), query, *sources
    sized = cells is None or interaction.max_hkl is not None  # then nothing has to be read, and CUDA need not wait
    unread = sized and node_batch.known_sizes is None
    if unread or not is_readable(pos) or not (cells is None or is_readable(cells.vectors)):
        return _without_reading(nodes, interaction, node_batch, cells, method)
    groups = choose(method, nodes[0], query.shape[-1] * sources[-1].shape[-1], interaction, node_batch, cells)
    if not groups:
        features = query.new_zeros(*query.shape[:2], sources[-1].shape[-1])
        return interaction.product(features, query.new_zeros(1, 1), 0) * 0
    single = next(iter(groups)) if len(groups) == 1 and node_batch.even else None  # rows that need no copy

    def kernel(*packed: Any) -> Tensor:
        rows = packed[-1]
        return _sums(single or rows.key, rows, packed[:-1], interaction, cells)

    return node_batch.mix(kernel, *nodes, groups=None if single else groups)


def _sums(
    choice: Choice, rows: PaddedBatch, nodes: Sequence[Tensor], interaction: Interaction, cells: Cells | None
) -> Tensor:
    """Sums (b, n, heads, E) over some graphs by one method."""
    pos, query, *sources = nodes
    if choice.method == "direct":
        return direct_sums(pos, query, tuple(sources), interaction)
    cells = (cells or Cells.none(rows.node_batch.count, pos.device)).select(rows.graph)
    terms, nufft = () if interaction.max_hkl else choice.terms, choice.method == "nufft"
    ranks = rows.node_batch.ranks
    return reciprocal_sums(pos, query, tuple(sources), rows.mask, interaction, cells, terms, nufft, ranks)


def _without_reading(
    nodes: Sequence[Tensor], interaction: Interaction, node_batch: NodeBatch, cells: Cells | None, method: str
) -> Tensor:
    """Sums over all graphs in one group. If some graphs may repeat and others not, both methods are computed."""
    if method == "nufft" or node_batch.ranks is not None:
        what = "method must not be 'nufft'" if method == "nufft" else "process_group must be None"
        raise ValueError(f"{what} while a model is traced or mapped over")
    if method == "direct" and cells is not None:
        raise ValueError("method must be 'auto' or 'ewald' with cell, got 'direct'")
    rows = node_batch.padded()
    packed = [rows.pack(x) for x in nodes]

    def run(method: str, cells: Cells | None) -> Tensor:
        return rows.unpack(_sums(Choice(method), rows, packed, interaction, cells))

    if cells is None and method != "ewald":
        return run("direct", None)
    if interaction.max_hkl is None:
        raise ValueError("max_hkl must be given with cell while a model is traced or mapped over, got None")
    if method == "ewald" or cells is None:
        return run("ewald", cells)
    repeats = cells.periodic.any(1)
    small = Cells(cells.vectors, cells.periodic | ~repeats[:, None])  # in open graphs, where the result is not used
    return torch.where(node_batch.spread(repeats)[:, None, None], run("ewald", small), run("direct", None))
