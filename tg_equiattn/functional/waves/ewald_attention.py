"""Attention of clouds, slabs and crystals through kernels of Ewald's form, in whichever way is least work."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...precision import full_precision
from ...ragged import Ragged, Rows, readable
from ...transforms import transformed
from .costs import cheapest
from .kernels import EwaldKernels, MaxWaves, Product, every_product, waves_of_kernels
from .lattice_sums import again, lattice_sums
from .lattices import Cells, cells_of
from .mesh import mesh_available
from .pair_sums import pair_sums

METHODS = ("auto", "pairs", "waves", "mesh")
_BLOCK = {"cpu": 1 << 21, "other": 1 << 26}  # pairs times kernels of a block


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
    product: Product | None = None,
    method: str = "auto",
    max_waves: tuple[int, int, int] | None = None,
    batch_size: int | None = None,
    max_num_nodes: int | None = None,
) -> Tensor:
    r"""Attention of nodes in space through Gaussians and smeared Coulomb potentials, and what derives from them.

    .. math:: \mathrm{out}_i = \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j)

    with :math:`K(r) = e^{-r^2 / 2 s^2}` or :math:`s\, \mathrm{erf}(r / \sqrt 2 s) / r`, solid harmonics Y and a product
    of values with them. The sum includes i itself, and, where graphs repeat, all images of each node; of potentials in
    three directions without the wave k = 0 (a uniform background makes every cell neutral). Three ways lead to it:
    pairs, exactly, where nothing repeats; the waves that repeat with the cell, or with a box around what is open, where
    potentials end at a distance that no two nodes have; and these waves by non-uniform fast Fourier transforms.

    Args:
        query, key: ``(T, heads, C, A)``, contracted over A for each of the C kernels.
        value: ``(T, heads, V)``.
        pos: ``(T, 3)``. Give large coordinates in float64, whatever the features are.
        kernels: their widths, gains and bounds.
        batch: sorted int64 ``(T,)``, the graph of each node; ``None`` means one.
        cell: lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``.
        pbc: bool ``(3,)`` or ``(B, 3)``, along which of them graphs repeat; ``None`` for those that are not zero.
        product: of features ``(..., heads, V)``, harmonics of one degree ``(..., 1, 2 l + 1)`` and that degree to
            ``(..., heads, E)``, linear in both. ``None`` means every product apart, E = V (lmax + 1)².
        method: ``"pairs"``, ``"waves"``, ``"mesh"`` (which needs the extra ``mesh``), or ``"auto"``: for every graph by
            itself whichever is least work.
        max_waves: bounds of wave numbers along the three vectors, for the narrowest kernel: given, no cell is read,
            which torch.compile needs.
        batch_size, max_num_nodes: number of graphs and a bound of their sizes, read from ``batch`` where not given.

    Returns:
        ``(T, heads, E)``, in float32 where values have half precision.

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
        query, key, value = (x.to(dtype) for x in (query, key, value))
        product = product or every_product(kernels.lmax)
        waves = waves_of_kernels(max_waves, kernels.bounds)
        return attention_of_nodes(query, key, value, pos, kernels, ragged, cells, product, method, waves)


def attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, pos: Tensor, kernels: EwaldKernels, ragged: Ragged, cells: Cells | None,
    product: Product, method: str = "auto", max_waves: MaxWaves = None,
) -> Tensor:  # fmt: skip
    """:func:`ewald_attention`, unchecked but for what hangs on values."""
    pos = ragged.centred(pos)
    unread = ragged.known is None and (cells is None or max_waves is not None)  # as sizes are given on CUDA
    if unread or not readable(pos) or not (cells is None or readable(cells.vectors)):
        return _without_reading(query, key, value, pos, kernels, ragged, cells, product, method, max_waves)
    if ragged.ranks is None and (not ragged.nodes or not ragged.count):
        return product(value, value.new_zeros(1, 1), 0)
    sizes = ragged.read() if ragged.ranks is None else ragged.totals.tolist()
    repeats = [False] * ragged.count if cells is None else cells.periodic.any(1).tolist()
    if method == "pairs" and any(repeats):
        raise ValueError("method must be 'auto', 'waves' or 'mesh' for graphs that repeat, got 'pairs'")
    mesh = mesh_available() and not transformed()
    if method == "mesh" and not mesh:
        raise ValueError("method='mesh' needs pytorch-finufft (the extra mesh) and no torch.func around it")
    if ragged.ranks is not None and method == "pairs":
        raise ValueError("method must not be 'pairs' with process_group: pairs may be of two processes")
    channels = value.shape[2] + product(value[:0], value.new_zeros(1, 1), 0).shape[2]
    chosen: dict[tuple, list[int]] = {}
    for graph, size in enumerate(sizes):  # on all ranks, which have to choose alike
        if size:
            way, waves, splits = cheapest(
                method,
                graph,
                size,
                pos,
                ragged,
                cells if repeats[graph] else None,
                kernels,
                query.shape[3],
                channels,
                mesh,
            )
            chosen.setdefault((way, splits, waves, size.bit_length()), []).append(graph)
    if not chosen:
        return product(value, value.new_zeros(1, 1), 0) * 0

    def kernel(query: Tensor, key: Tensor, value: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        way, splits, *_ = rows.key
        return _of_rows(way, rows, query, key, value, pos, kernels, cells, product, max_waves, splits)

    return ragged.mix(kernel, query, key, value, pos, groups=chosen)


def _of_rows(
    way: str, rows: Rows, query: Tensor, key: Tensor, value: Tensor, pos: Tensor, kernels: EwaldKernels,
    cells: Cells | None, product: Product, max_waves: MaxWaves, splits: tuple[float, ...] = (),
) -> Tensor:  # fmt: skip
    """(b, longest, H, E) of a group of graphs."""
    if way == "pairs":
        return _pairs_in_blocks(pos, query, key, value, kernels, product)
    if cells is None:
        cells = Cells.none(rows.ragged.count, pos)
    return lattice_sums(
        pos, rows.mask, query, key, value, kernels, cells.of(rows.graph), product,
        splits=() if max_waves else splits, max_waves=max_waves, mesh=way == "mesh", ranks=rows.ragged.ranks,
    )  # fmt: skip


def _without_reading(
    query: Tensor, key: Tensor, value: Tensor, pos: Tensor, kernels: EwaldKernels, ragged: Ragged, cells: Cells | None,
    product: Product, method: str, max_waves: MaxWaves,
) -> Tensor:  # fmt: skip
    """Without reading values: all graphs in one group, in both ways where some may repeat and others not."""
    if method == "mesh" or ragged.ranks is not None:
        what = "method must not be 'mesh'" if method == "mesh" else "process_group must be None"
        raise ValueError(f"{what} while a model is traced or mapped over")
    if method == "pairs" and cells is not None:
        raise ValueError("method must be 'auto' or 'waves' with cell, got 'pairs'")
    rows = ragged.rows(whole=True)
    arguments, more = (*map(rows.pack, (query, key, value, pos)), kernels), (product, max_waves)
    if cells is None and method != "waves":
        return rows.unpack(_of_rows("pairs", rows, *arguments, cells, *more))
    if max_waves is None:
        raise ValueError("max_waves must be given with cell while a model is traced or mapped over, got None")
    if method == "waves" or cells is None:
        return rows.unpack(_of_rows("waves", rows, *arguments, cells, *more))
    repeats = cells.periodic.any(1)
    small = Cells(cells.vectors, cells.periodic | ~repeats[:, None])  # of open graphs: what they give is not used
    waves, pairs = (_of_rows(way, rows, *arguments, small, *more) for way in ("waves", "pairs"))
    return rows.unpack(torch.where(repeats[:, None, None, None], waves, pairs))


def _pairs_in_blocks(
    pos: Tensor, query: Tensor, key: Tensor, value: Tensor, kernels: EwaldKernels, product: Product
) -> Tensor:
    """Blocks of graphs, or of nodes that attend, which backward computes again."""
    pos = pos.to(value.dtype)
    graphs, nodes = pos.shape[:2]
    widths, gains = kernels.widths.to(value.dtype), kernels.gains.to(value.dtype)

    def block(pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return pair_sums(pos_i, query, pos, key, value, widths, gains, kernels.gaussians, product)

    if checks.is_traced(pos) or transformed():
        return block(pos, query, pos, key, value)
    limit = _BLOCK.get(pos.device.type, _BLOCK["other"])
    row = max(1, nodes * widths.numel())
    some_graphs, some_nodes = max(1, limit // max(1, row * nodes)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= nodes:
        return block(pos, query, pos, key, value)
    out = []
    for part in zip(*(x.split(some_graphs) for x in (pos, query, key, value)), strict=True):
        blocks = zip(*(x.split(some_nodes, 1) for x in part[:2]), strict=True)
        out.append(torch.cat([again(block, *rows, part[0], *part[2:]) for rows in blocks], 1))
    return torch.cat(out)
