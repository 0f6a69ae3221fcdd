"""The base class of layers of Ewald attention: projections of nodes, kernels of learned widths, products with solid
harmonics, and their sums."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.node_batch import NodeBatch
from ..modules import NotScriptable, StoresSettings, read_tokens, reset_children
from ..shapes import Float
from ..torch_state import Tables, full_precision
from .cells import Cells, cells_of
from .ewald_attention import Error, Method, MillerIndices, ewald_attention
from .harmonics import solid_harmonics
from .kernels import Coulomb, Gaussian, Interaction, Kernel, Product

_CONTENT = 0.1  # initial size of the part of queries and keys that depends on features; the other part is 1
Coupling = Callable[[int, int, int], Tensor]


class Irrep(NamedTuple):
    """Channels of one degree l and parity. A row of features holds the 2 l + 1 components one after the other, and each
    component holds all channels."""

    degree: int
    parity: int
    channels: int

    def __str__(self) -> str:
        return f"{self.channels}x{self.degree}{'e' if self.parity == 1 else 'o'}"

    @property
    def size(self) -> int:
        """Components of a channel."""
        return 2 * self.degree + 1

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self.size * self.channels

    @property
    def invariant(self) -> bool:
        """True for scalars that keep their sign in a reflection."""
        return (self.degree, self.parity) == (0, 1)

    def shared(self, heads: int) -> Irrep:
        """The channels of a head."""
        return self._replace(channels=-(-self.channels // heads))


def split_rows(
    x: Float[Tensor, "*nodes dim"], irreps: Sequence[Irrep]
) -> list[Float[Tensor, "*nodes components channels"]]:
    """Split rows into the components and channels of each irrep."""
    blocks, start = [], 0
    for degree, _, channels in irreps:
        size = 2 * degree + 1
        blocks.append(x.narrow(-1, start, size * channels).unflatten(-1, (size, channels)))
        start += size * channels
    return blocks


def _octaves(width: float, max_width: float, *counts: int) -> tuple[tuple[float, float], ...]:
    """The octave of each width. Octaves of the kernels of each kind are spread from ``width`` to ``max_width``."""
    steps = [n / max(1, count - 1) for count in counts for n in range(count)]
    lows = [width * (max_width / width / 2) ** step for step in steps]
    return tuple((low, 2 * low) for low in lows)


@checks.arguments
class EwaldLayer(NotScriptable, StoresSettings):
    """Ewald attention on rows of irreps: each degree and parity once, in rising order, with components before channels.

    ``coupling`` of a subclass returns the couplings of three degrees. Its ``forward`` reads features and calls
    :meth:`attend`. At the start queries and keys of invariants are near 1, and others are near 0.
    """

    coupling: Coupling
    old_arguments: ClassVar = {"avg_num_nodes": "it is output_scale now"}

    def __init__(
        self, rows_in: Sequence[Irrep], rows_out: Sequence[Irrep], name_out: str, *, width: checks.Positive,
        max_width: checks.Positive | None = None, num_gaussians: checks.Whole = 4, num_coulomb: checks.Whole = 4,
        kernels: nn.Module | None = None, heads: checks.Count = 1, lmax: checks.Whole = 1,
        output_scale: checks.Positive = 1.0, error: Error = 1e-4, method: Method = "auto",
        max_hkl: MillerIndices | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        max_width = 8 * width if max_width is None else max_width
        if max_width < 2 * width:
            raise ValueError(f"max_width must be at least an octave above width, {2 * width:g}, got {max_width:g}")
        if kernels is not None and not isinstance(getattr(kernels, "count", None), int):
            raise ValueError(f"kernels must be a module with an integer count, got {checks.described(kernels)}")
        if kernels is None and not num_gaussians and not num_coulomb:
            raise ValueError("num_gaussians and num_coulomb must not both be 0 without kernels")
        self.width, self.max_width, self.heads, self.lmax = width, max_width, heads, lmax
        self.output_scale, self.error, self.method, self.max_hkl = output_scale, error, method, max_hkl
        self.own_kernels = copy.deepcopy(kernels)
        own: Any = 0 if kernels is None else kernels.count
        self.counts: tuple[int, int, int] = num_gaussians, num_coulomb, own
        self.bounds = _octaves(width, max_width, num_gaussians, num_coulomb)
        self.rows_in, self.rows_out, count = tuple(rows_in), tuple(rows_out), sum(self.counts)
        values, results = ([irrep.shared(heads) for irrep in rows] for rows in (rows_in, rows_out))
        self.product = HarmonicProduct(values, results, lmax, heads, self.coupling)
        zero = [str(row) for b, row in enumerate(rows_out) if not any(b == path[2] for path in self.product.paths)]
        if zero:
            raise ValueError(
                f"{name_out} must be reachable from the input by products with harmonics up to lmax={self.lmax}, got "
                f"{' + '.join(zero)} that would always be zero; pass a larger lmax (harmonics of degree l have parity "
                "(-1)^l), or leave it out"
            )
        self.query_key = nn.ParameterList(torch.empty(irrep.channels, 2 * heads * count) for irrep in rows_in)
        self.query_key_bias = nn.Parameter(torch.empty(2, heads, count))
        each = zip(rows_in, values, strict=True)
        self.value = nn.ParameterList(torch.empty(irrep.channels, heads * v.channels) for irrep, v in each)
        self.lows = Tables(functools.partial(_lowest_widths, self.bounds))
        self.octaves = nn.Parameter(torch.empty(1, num_gaussians + num_coulomb))  # heads share their kernels
        self.gains = nn.Parameter(torch.empty(heads, count, lmax + 1))
        back = zip(results, rows_out, strict=True)
        maps = [torch.empty(heads * result.channels, irrep.channels) for result, irrep in back]
        self.out = nn.ParameterList(maps) if heads > 1 else None
        self.reset_parameters()
        if self.own_kernels is not None:
            kernel = self.kernels()[-1]
            if not isinstance(kernel, Kernel) or kernel.long_range:
                raise ValueError(
                    "kernels must return a tg_equiattn.functional.Kernel without long_range, got "
                    f"{type(kernel).__name__}"
                )

    def reset_parameters(self) -> None:
        reset_children(self)
        for weight in self.query_key:
            nn.init.normal_(weight, std=_CONTENT * weight.shape[0] ** -0.5)
        for weight in [*self.value, *(self.out or ())]:
            nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
        nn.init.ones_(self.query_key_bias)
        nn.init.zeros_(self.octaves)
        nn.init.constant_(self.gains, self.gains.shape[1] ** -0.5)

    def settings(self) -> dict[str, Any]:
        own = None if self.own_kernels is None else type(self.own_kernels).__name__
        heads: Any = self.heads
        if self.heads > 1 and self.octaves.numel():  # checkpoints with widths of each head have a number here
            heads = {"digest": f"{self.heads}, shared", "text": f"{self.heads}, whose heads share kernels"}
        return {
            "num_gaussians": self.counts[0], "num_coulomb": self.counts[1], "kernels": own,
            "width": float(self.width), "max_width": float(self.max_width), "heads": heads,
            "output_scale": float(self.output_scale),
        }  # fmt: skip

    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels of each kind, with widths within their octaves, and those of ``own_kernels``."""
        gaussians, coulomb, _ = self.counts
        widths = self.lows(self.octaves.device, self.octaves.dtype) * torch.exp2(self.octaves.sigmoid())
        of_gaussians, of_coulomb, of_own = self.gains.split(self.counts, 1)
        out: list[Kernel] = []
        if gaussians:
            out.append(Gaussian(widths[:, :gaussians], of_gaussians, self.bounds[:gaussians]))
        if coulomb:
            out.append(Coulomb(widths[:, gaussians:], of_coulomb, self.bounds[gaussians:]))
        return (*out, self.own_kernels(of_own)) if self.own_kernels is not None else tuple(out)

    def attend(
        self, x: Float[Tensor, "nodes dim_in"], pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch,
        cell: Tensor | None, pbc: Tensor | None, **more: Any,
    ) -> Float[Tensor, "nodes dim_out"]:  # fmt: skip
        """Attention of nodes, from checked features x and positions, and from cells that are checked here. More
        arguments are those of :meth:`sums`."""
        cells = cells_of(cell, pbc, node_batch.count, x)
        with full_precision(pos.device):
            x = node_batch.zero_padding(x.to(self.octaves.dtype))
            scores, values = [], []
            irreps = zip(self.rows_in, split_rows(x, self.rows_in), self.query_key, self.value, strict=True)
            for irrep, features, score, value in irreps:
                score = (features @ score).unflatten(2, (2, self.heads, -1)) / math.sqrt(irrep.size)
                scores.append(score + self.query_key_bias if irrep.invariant else score)  # T, 2 l + 1, 2, H, C
                values.append((features @ value).unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(2))
            if not any(irrep.invariant for irrep in self.rows_in):
                scores.append(self.query_key_bias.expand(pos.shape[0], 1, -1, -1, -1))
            # contiguous: gathers of rows keep the order of strides in some of torch's tracers, and not in others
            query, key = torch.cat(scores, 1).movedim(1, 4).contiguous().unbind(1)  # T, H, C, A
            value = torch.cat(values, 2) / self.output_scale
            interaction = Interaction(self.kernels(), self.product(value), self.error, self.max_hkl)
            out = self.sums(query, key, value, pos, interaction, node_batch, cells, **more)
            if self.out is None:
                return node_batch.zero_padding(out[:, 0])
            each = zip(split_rows(out, self.product.rows_out), self.out, strict=True)
            mixed = [(features.transpose(1, 2).flatten(2) @ weight).flatten(1) for features, weight in each]
            return node_batch.zero_padding(torch.cat(mixed, 1))

    def sums(
        self, query: Float[Tensor, "nodes heads kernels contracted"],
        key: Float[Tensor, "nodes heads kernels contracted"], value: Float[Tensor, "nodes heads dim"],
        pos: Float[Tensor, "nodes 3"], interaction: Interaction, node_batch: NodeBatch, cells: Cells | None,
    ) -> Float[Tensor, "nodes heads out"]:  # fmt: skip
        """Sums over nodes."""
        return ewald_attention(pos, query, (key, value), interaction, node_batch, cells, self.method)


def _lowest_widths(bounds: tuple[tuple[float, float], ...]) -> Float[Tensor, " kernels"]:
    return torch.tensor([low for low, _ in bounds], dtype=torch.float64)


def _couplings(
    rows_in: tuple[Irrep, ...], rows_out: tuple[Irrep, ...], paths: Sequence[tuple[int, int, int]], coupling: Coupling
) -> tuple[Float[Tensor, "harmonics pairs"], ...]:
    """A float64 matrix for each path, from components of harmonics to pairs of components of input and output."""
    tables = []
    for a, degree, b in paths:
        exact = coupling(rows_in[a].degree, degree, rows_out[b].degree).to(torch.float64) * math.sqrt(rows_out[b].size)
        tables.append(exact.permute(1, 0, 2).reshape(2 * degree + 1, -1).contiguous())
    return tuple(tables)


class HarmonicProduct(nn.Module):
    r"""A bilinear, equivariant map of features and solid harmonics: products of both, with learned weights.

    .. math:: \mathrm{out}^{c'}_{m'} = \sum_{\text{paths}} \sum_{c, m, n} w_{c c'}\,
        \sqrt{2 l'' + 1}\, C_{m n m'}\, x^c_m\, Y_n

    A path couples the degree of a feature x, the degree of harmonics Y up to ``lmax`` and the degree :math:`l''` of an
    output, with a coupling C of norm 1. Each head has its own weights w, which mix channels c and c'.
    """

    def __init__(
        self, rows_in: Sequence[Irrep], rows_out: Sequence[Irrep], lmax: int, heads: int, coupling: Coupling
    ) -> None:
        super().__init__()
        self.rows_in, self.rows_out = tuple(rows_in), tuple(rows_out)
        self.paths = tuple(
            (a, degree, b)
            for a, first in enumerate(rows_in)
            for degree in range(lmax + 1)
            for b, out in enumerate(rows_out)
            if abs(first.degree - degree) <= out.degree <= first.degree + degree
            and first.parity * (-1) ** degree == out.parity
        )
        self.couplings = Tables(functools.partial(_couplings, self.rows_in, self.rows_out, self.paths, coupling))
        self.weights = nn.ParameterList(
            torch.empty(heads, rows_in[a].channels, rows_out[b].channels) for a, _, b in self.paths
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, with the variance that keeps the variance of features."""
        for (_, _, b), weight in zip(self.paths, self.weights, strict=True):
            into = sum(self.rows_in[a].channels for a, _, other in self.paths if other == b)
            nn.init.normal_(weight, std=into**-0.5)

    def forward(self, like: Tensor) -> Product:
        """The product, with tables of the dtype and device of a tensor."""
        tables = self.couplings(like.device, like.dtype)
        return Product(_products, (self.rows_in, self.rows_out, self.paths, tables, tuple(self.weights)))


def _products(
    parts: Sequence[tuple[Tensor, Tensor | None]], rows_in: Sequence[Irrep], rows_out: Sequence[Irrep],
    paths: Sequence[tuple[int, int, int]], couplings: Sequence[Tensor], weights: Sequence[Tensor],
) -> Float[Tensor, "*nodes heads out"]:  # fmt: skip
    """Products of features (..., heads, channels) with harmonics (..., heads or 1, 2 l + 1), summed over degrees, or,
    without harmonics, of features (..., heads, 2 l + 1, channels) that have been multiplied by each of them."""
    each = [split_rows(features, rows_in) for features, _ in parts]
    features, harmonics = parts[0]
    if harmonics is None:
        shape, each = features.shape[:-2], [[x.flatten(-3, -2) for x in own] for own in each]
    else:
        shape = torch.broadcast_shapes(features.shape[:-1], harmonics.shape[:-1])
    out = []
    for b, irrep in enumerate(rows_out):
        own = [(n, a, degree) for n, (a, degree, to) in enumerate(paths) if to == b and degree < len(parts)]
        terms = [_product(each[k][a], parts[k][1], couplings[n], irrep.size, weights[n]) for n, a, k in own]
        found = sum(terms[1:], terms[0]).flatten(-2) if terms else features.new_zeros(irrep.dim)
        out.append(found.expand(*shape, -1))
    return torch.cat(out, -1)


def _product(
    x: Float[Tensor, "*#nodes heads components_in channels"], harmonics: Float[Tensor, "*#nodes _ components"] | None,
    coupling: Float[Tensor, "components pairs"], wide: int, weight: Float[Tensor, "heads channels channels_out"],
) -> Float[Tensor, "*nodes heads wide channels_out"]:  # fmt: skip
    """Features times harmonics, with channels mixed by a weight, to ``wide`` components."""
    size = x.shape[-2]
    if coupling.shape[0] == 1:  # degree 0, whose coupling is the identity
        return _mix(x, weight) if harmonics is None else _mix(x, weight) * harmonics[..., None]
    if harmonics is None:
        matrix = coupling.view(size, wide).mT
    else:
        matrix = (harmonics[..., None] * coupling).sum(-2).unflatten(-1, (size, wide)).mT
    if size < wide:  # mix the channels of fewer components
        return _apply(matrix, _mix(x, weight))
    return _mix(_apply(matrix, x), weight)


def _apply(
    matrix: Float[Tensor, "*#nodes 1 wide components"], x: Float[Tensor, "*#nodes heads components channels"]
) -> Float[Tensor, "*nodes heads wide channels"]:
    """Matrices times the components of features."""
    if x.shape[-2] == 1:
        return matrix * x
    if matrix.shape[-2] == 1:
        return (matrix.mT * x).sum(-2, keepdim=True)
    return matrix @ x


def _mix(
    x: Float[Tensor, "*#nodes heads components channels"], weight: Float[Tensor, "heads channels out"]
) -> Float[Tensor, "*nodes heads components out"]:
    """Channels mixed by a matrix for each head."""
    if weight.shape[0] == 1:
        return nn.functional.linear(x, weight[0].mT)
    by_head = x.movedim(-3, 0)
    return torch.bmm(by_head.flatten(1, -2), weight).unflatten(1, by_head.shape[1:-1]).movedim(0, -3)


def gaunt_coupling(first: int, second: int, out: int) -> Float[Tensor, "2*first+1 2*second+1 2*out+1"]:
    """The invariant product of three degrees, with norm 1, which is unique. The sum of the degrees must be even and at
    most 5.

    It is the mean over the sphere of products of three harmonics. For these degrees the mean over the corners of an
    icosahedron is the same.
    """
    golden = (1 + math.sqrt(5)) / 2
    corners = [(0.0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    points = torch.cat([torch.tensor(corners, dtype=torch.float64).roll(n, 1) for n in range(3)])
    harmonics = solid_harmonics(points / math.hypot(1, golden), max(first, second, out))
    mean = torch.einsum("ma,mb,mc->abc", *(harmonics[:, n**2 : (n + 1) ** 2] for n in (first, second, out)))
    return mean / mean.norm()


@checks.arguments_of(EwaldLayer)
class EwaldAttention(EwaldLayer):
    r"""Global attention in molecules, slabs and crystals of any size, through Gaussian and Coulomb kernels.

    Query, key and value are linear maps of scalars and vectors; inner products are over both. With kernels K of learned
    widths s (:class:`tg_equiattn.functional.Gaussian`, :class:`~tg_equiattn.functional.Coulomb`) and a linear map W of
    products of values with solid harmonics Y to scalars and vectors,

    .. math:: \mathrm{out}_i = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        W \big[ v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j) \big]

    The sum includes the node itself and, if a graph repeats, all images of all nodes; one batch may hold molecules,
    slabs and crystals. In a new layer queries and keys are near 1, so it computes potentials and fields of its values.
    The output has no residual connection and is extensive: see ``output_scale``. Equivariant to rotations, reflections,
    translations and permutations; smooth in positions and cells, with derivatives of any order. Direct sums are exact.
    Sums over the reciprocal vectors of a cell have exact symmetries and approximate to ``error``. Sums over the vectors
    of a box around a large open graph, and sums over images, have symmetries to ``error`` too (:doc:`/crystals`). Under
    autocast everything is computed and returned in float32.

    Args:
        scalar_channels: Scalars of the input.
        vector_channels: Vectors of the input.
        width: Width of the narrowest kernel, in the unit of ``pos``. Use about half of the message-passing cutoff:
            messages already model shorter distances.
        max_width: Width of the widest kernel. The default, ``None``, means 8 ``width``. It is at least twice ``width``.
            Each width is learned within an octave of its own between the two.
        out_channels: Scalars and vectors of the output. The default, ``None``, means as many as in the input.
        num_gaussians: Number of Gaussian kernels, 4 by default.
        num_coulomb: Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.
        kernels: Module with kernels of your own, beside the others. It has an integer ``count``, and called with gains
            ``(heads, count, lmax + 1)`` it returns a :class:`tg_equiattn.functional.Kernel` with these gains
            (:doc:`/crystals`). The layer keeps a copy. The default is ``None``.
        heads: Number of heads, 1 by default, each with its own queries and keys and a share of the values. They share
            kernels.
        lmax: Highest degree of the solid harmonics, 1 by default.
        output_scale: Constant by which sums are divided, 1 by default, the same for all graphs. Use the size of outputs
            that a new layer has with 1: terms have different signs and sizes, so it is not the number of nodes.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by
            default. Use 1e-2 to train faster.
        method: ``"direct"`` sums over all pairs of nodes, in graphs that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, chooses for every graph: direct sums if it is open, and reciprocal sums
            if it repeats. In a wide cell with few nodes, parts of kernels that decay fast are summed over pairs and
            their nearest images. From some thousand nodes on, non-uniform transforms are used where they are installed
            and faster.
        max_hkl: Largest Miller indices along the lattice vectors a, b, c, for the kernel with the largest cutoff k:
            each above :math:`|a| k / 2 \pi`. If one is too small, an error names what is needed. If given, cells are
            not read, which torch.compile needs. The default, ``None``, reads them.

    Shapes:
        ``(B, N, S)``, ``(B, N, V, 3)`` and positions ``(B, N, 3)``, or flat ``(T, S)``, ``(T, V, 3)`` and ``(T, 3)``
        with ``batch``, to scalars and vectors again. Positions, cells and widths have one unit of length.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: Ewald 1921; attention in linear time by plane waves, Frank et al. (arXiv 2412.08541); in crystals, Kosmala
    et al. (arXiv 2303.04791); truncated potentials, Vico, Greengard and Ferrando 2016.

    Example:
        >>> import torch
        >>> attention = EwaldAttention(8, 4, width=0.5)
        >>> pos = torch.rand(2, 101, 3)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 4, 3), pos=pos)
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 4, 3]))
    """

    coupling = staticmethod(gaunt_coupling)

    def __init__(
        self, scalar_channels: checks.Whole, vector_channels: checks.Whole, *,
        out_channels: tuple[checks.Whole, checks.Whole] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        in_channels = _channels("scalar_channels, vector_channels", (scalar_channels, vector_channels))
        out_channels = in_channels if out_channels is None else _channels("out_channels", out_channels)
        super().__init__(_rows(in_channels), _rows(out_channels), "out_channels", **settings)
        self.in_channels, self.out_channels = in_channels, out_channels

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"in_channels": self.in_channels, "out_channels": self.out_channels}

    def forward(
        self, scalars: Tensor | None, vectors: Tensor | None, lengths: Tensor | None = None, *, pos: Tensor,
        batch: Tensor | None = None, cell: Tensor | None = None, pbc: Tensor | None = None,
        batch_size: int | None = None, max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Scalars and vectors of the nodes.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``. ``None`` if there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``. ``None`` if there are no vector channels.
            lengths: int64 ``(B,)``, the number of nodes of each padded graph. Padding is never read; its output is 0.
            pos: ``(B, N, 3)`` or ``(T, 3)``. Give large coordinates in float64, whatever the features are.
            batch: Sorted int64 ``(T,)``, the graph of each flat node. ``None`` means one graph.
            cell: Lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``.
            pbc: bool ``(3,)`` or ``(B, 3)``, the lattice vectors along which graphs repeat: three, two or none.
                ``None`` means all that are not zero.
            batch_size: Number of flat graphs. ``None`` reads it from ``batch``, which torch.compile cannot.
            max_num_nodes: Bound of the number of nodes of a flat graph. ``None`` reads it from ``batch``.
        """
        shape, scalars, vectors, node_batch = read_tokens(
            scalars, vectors, self.in_channels, self.octaves, lengths, batch, batch_size, max_num_nodes
        )
        pos = checks.positions(pos, (*shape, 3), scalars, "attention depends on them").reshape(-1, 3)
        out = self.attend(torch.cat([scalars, vectors.mT.flatten(1)], 1), pos, node_batch, cell, pbc)
        scalars, vectors = out.split([self.out_channels[0], 3 * self.out_channels[1]], 1)
        vectors = vectors.unflatten(1, (3, self.out_channels[1])).mT.contiguous()
        return scalars.reshape(*shape, scalars.shape[1]), vectors.view(*shape, *vectors.shape[1:])

    def extra_repr(self) -> str:
        return f"{self.in_channels} -> {self.out_channels}, width={self.width}, kernels={self.counts}"


def _rows(channels: tuple[int, int]) -> list[Irrep]:
    return [irrep for irrep in (Irrep(0, 1, channels[0]), Irrep(1, -1, channels[1])) if irrep.channels]


def _channels(name: str, given: tuple[int, int]) -> tuple[int, int]:
    if not any(given):
        raise ValueError(f"{name} must not both be 0, got {given!r}")
    return given[0], given[1]
