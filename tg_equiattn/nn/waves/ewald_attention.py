"""Ewald attention of scalars and vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...functional.waves.lattices import cells_of
from ...precision import full_precision
from ...ragged import Ragged
from ...ranks import Shared
from ..not_scriptable import NotScriptable
from .ewald_network import EwaldNetwork, EwaldOptions
from .spherical_features import Irrep, gaunt_coupling


class EwaldAttention(Shared, NotScriptable, torch.nn.Module):
    r"""Attention in space through Gaussians and smeared Coulomb potentials: molecules, slabs, crystals, any size.

    Query, key and value are linear maps of scalars and vectors; inner products are of both. With kernels K of learned
    widths s, :math:`e^{-r^2 / 2 s^2}` or :math:`s\, \mathrm{erf}(r / \sqrt 2 s) / r`, and a linear map W of products of
    values with solid harmonics Y to scalars and vectors,

    .. math:: \mathrm{out}_i = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        W \big[ v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j) \big]

    The sum includes the node itself and, where a graph repeats, all images of all nodes. Nothing that is learned
    depends on the size of a graph or of its cell. A new layer gives potentials and fields of its values: queries and
    keys are near 1. The output is attention alone, without a residual connection, and extensive. Equivariant to
    rotations, reflections, translations and permutations; smooth in positions and cells, with derivatives of any order.
    Which ways there are, and how exact, see :func:`tg_equiattn.functional.ewald_attention`. Under autocast it is
    computed and returned in float32.

    Args:
        scalar_channels, vector_channels: of the input.
        width: of the narrowest kernel, in the unit of positions: about half the reach of the messages beside it. Widths
            are learned, each within an octave of its own between this and ``max_width``.
        max_width: of the widest kernel; ``None`` means eight times ``width``.
        out_channels: scalars and vectors of the output; ``None`` means those of the input.
        kernels: how many, half Gaussians and half potentials, or a pair of numbers of each.
        heads: of attention. Each has queries, keys and widths of its own, and a share of the values.
        lmax: the highest degree of harmonics.
        avg_num_nodes: nodes that a node attends to, by which sums are divided, the same for all graphs.
        error: what is promised of sums by waves, relative to the largest value of a kernel.
        method: ``"pairs"``, ``"waves"``, ``"mesh"`` (which needs the extra ``mesh``), or ``"auto"``: for every graph by
            itself whichever is least work.
        max_waves: bounds of wave numbers along the lattice vectors a, b, c for the narrowest kernel; given, cells are
            not read, which torch.compile needs.

    Shapes:
        ``(B, N, S)``, ``(B, N, V, 3)`` and positions ``(B, N, 3)``, or flat ``(T, S)``, ``(T, V, 3)`` and ``(T, 3)``
        with ``batch``, to scalars and vectors again.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Ewald 1921; attention in linear time by waves, Frank et al. (arXiv 2412.08541); in crystals, Kosmala et al.
    (arXiv 2303.04791).

    Example:
        >>> import torch
        >>> attention = EwaldAttention(8, 4, width=0.5)
        >>> pos = torch.rand(2, 101, 3)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 4, 3), pos=pos)
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 4, 3]))
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        *,
        width: float,
        max_width: float | None = None,
        out_channels: tuple[int, int] | None = None,
        kernels: int | tuple[int, int] = 8,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_waves: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        options = EwaldOptions(
            width=width, max_width=max_width, kernels=kernels, heads=heads, lmax=lmax, avg_num_nodes=avg_num_nodes,
            error=error, method=method, max_waves=max_waves,
        )  # fmt: skip
        self.in_channels = _channels("scalar_channels, vector_channels", (scalar_channels, vector_channels))
        self.out_channels = self.in_channels if out_channels is None else _channels("out_channels", out_channels)
        inside, outside = (
            [Irrep(0, 1, scalars), Irrep(1, -1, vectors)] for scalars, vectors in (self.in_channels, self.out_channels)
        )
        self.attention = EwaldNetwork(inside, outside, gaunt_coupling, options, lambda irrep: "out_channels")

    def why_not_shared(self) -> str | None:
        return self.attention.options.why_not_shared()

    def forward(
        self,
        scalars: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None = None,
        *,
        pos: Tensor,
        batch: Tensor | None = None,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scalars and vectors of the nodes.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``; ``None`` where there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``; ``None`` where there are no vector channels.
            lengths: int64 ``(B,)``, the own length of each graph; what lies beyond is never read, and zero.
            pos: ``(B, N, 3)`` or ``(T, 3)``. Give large coordinates in float64, whatever the features are.
            batch: sorted int64 ``(T,)``, the graph of each flat node; ``None`` means one.
            cell: lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``.
            pbc: bool ``(3,)`` or ``(B, 3)``, along which of them graphs repeat: three, two or none; ``None`` for those
                that are not zero.
            batch_size, max_num_nodes: number of flat graphs and a bound of their sizes, read from ``batch`` where not
                given, which torch.compile cannot.
        """
        shape, parts = self._parts(scalars, vectors)
        first = parts[0]
        pos = checks.positions(pos, (*shape, 3), first, "attention depends on them").reshape(-1, 3)
        if len(shape) == 1:
            if lengths is not None:
                raise ValueError("lengths must be None where the input is flat: use batch")
            ragged = Ragged.flat(first, batch, batch_size, max_num_nodes, self.ranks)
        else:
            if batch is not None or self.ranks is not None:
                name = "process_group" if batch is None else "batch"
                raise ValueError(f"{name} must be None where the input is (B, N, ...): use lengths, or flat nodes")
            checks.lengths(lengths, shape[0], shape[1], first.device)
            ragged = Ragged.dense(shape[0], shape[1], lengths, first.device)
        cells = cells_of(cell, pbc, ragged.count, first)
        with full_precision(first.device):
            parts = [ragged.zero_padding(x.to(self.attention.reference_parameter.dtype)) for x in parts]
            found = self.attention(parts, pos, ragged, cells)
            out = [ragged.zero_padding(x.mT) for x in found]  # of what there is, scalars first
        none = out[0].new_zeros(0)
        of_scalars, of_vectors = (out[i] if n else none for i, n in zip((0, -1), self.out_channels, strict=True))
        return of_scalars.reshape(*shape, self.out_channels[0]), of_vectors.reshape(*shape, self.out_channels[1], 3)

    def _parts(self, scalars: Tensor | None, vectors: Tensor | None) -> tuple[tuple[int, ...], list[Tensor]]:
        """The shape of nodes, and (T, 1, S) and (T, 3, V) of what there is."""
        first = scalars if scalars is not None else vectors
        if first is None:
            raise ValueError("vectors must be given where scalars are None, got None")
        shape = tuple(first.shape[: first.ndim - (1 if first is scalars else 2)])
        reference = self.attention.reference_parameter
        checks.full_parameters(reference)
        parts = []
        for name, x, axes in (
            ("scalars", scalars, self.in_channels[:1]), ("vectors", vectors, (self.in_channels[1], 3))
        ):  # fmt: skip
            if x is None and not axes[0]:
                continue
            if not isinstance(x, Tensor) or len(shape) not in (1, 2) or tuple(x.shape) != (*shape, *axes):
                layout = f"(B, N, {', '.join(map(str, axes))}), or (T, {', '.join(map(str, axes))}) with batch"
                came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be {layout}, alike in both, got {came}")
            checks.same_kind(x, reference, name)
            checks.half_precision(**{name: x})
            x = x.flatten(0, len(shape) - 1)
            parts += [x[:, None] if len(axes) == 1 else x.mT] if axes[0] else []
        return shape, parts

    def reset_parameters(self) -> None:
        self.attention.reset_parameters()

    def extra_repr(self) -> str:
        options = self.attention.options
        return f"{self.in_channels} -> {self.out_channels}, width={options.width}, kernels={options.kernels}"


def _channels(name: str, given: tuple[int, int]) -> tuple[int, int]:
    fits = isinstance(given, (tuple, list)) and len(given) == 2
    if not fits or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given) or not any(given):
        raise ValueError(f"{name} must be two numbers from 0 on, not both 0, got {given!r}")
    return given[0], given[1]
