"""The base class of layers of Ewald attention: projections of nodes, kernels of learned widths, and their sums."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.waves.cells import cells_of
from ...functional.waves.ewald_attention import check_method, ewald_attention_impl, own_terms
from ...functional.waves.kernels import Coulomb, Gaussian, Interaction, Kernel, Sources
from ...modes import full_precision
from ...node_batch import NodeBatch
from ...ranks import Shared
from ...tables import Tables
from ..modules import NotScriptable, StoresSettings, reset_children
from .neutral_sources import Atoms, NeutralSources
from .spherical_features import Coupling, HarmonicProduct, Irrep, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float

_CONTENT = 0.1  # initial size of the part of queries and keys that depends on features; the other part is 1


class EwaldLayer(Shared, NotScriptable, StoresSettings):
    """Ewald attention on rows of irreps: each degree and parity once, in rising order, with components before channels.

    ``coupling`` of a subclass returns the couplings of three degrees. Its ``forward`` reads features and calls
    :meth:`attend`. At the start queries and keys of invariants are near 1, and others are near 0.
    """

    coupling: Coupling

    def __init__(
        self,
        rows_in: Sequence[Irrep],
        rows_out: Sequence[Irrep],
        name_out: str,
        *,
        width: float,
        max_width: float | None,
        num_gaussians: int,
        num_coulomb: int,
        kernels: nn.Module | None,
        heads: int,
        lmax: int,
        avg_num_nodes: float,
        error: float,
        method: str,
        max_hkl: Sequence[int] | None,
    ) -> None:
        super().__init__()
        checks.positive_number(width=width, avg_num_nodes=avg_num_nodes)
        max_width = 8 * width if max_width is None else max_width
        _check(width, max_width, num_gaussians, num_coulomb, kernels, heads, lmax, error, method, max_hkl)
        self.width, self.max_width, self.heads, self.lmax = width, max_width, heads, lmax
        self.avg_num_nodes, self.error, self.method, self.max_hkl = avg_num_nodes, error, method, max_hkl
        self.own_kernels = copy.deepcopy(kernels)
        own: Any = 0 if kernels is None else kernels.count
        self.counts: tuple[int, int, int] = num_gaussians, num_coulomb, own
        self.bounds = _bounds(width, max_width, num_gaussians, num_coulomb)
        self.rows_in, self.rows_out, count = tuple(rows_in), tuple(rows_out), sum(self.counts)
        values, found = ([irrep.shared(heads) for irrep in rows] for rows in (rows_in, rows_out))
        self.product = HarmonicProduct(values, found, lmax, heads, self.coupling)
        zero = [str(row) for b, row in enumerate(rows_out) if not any(b == path[2] for path in self.product.paths)]
        if zero:
            raise ValueError(
                f"{name_out} must be reachable from the input by products with harmonics up to lmax={lmax}, got "
                f"{' + '.join(zero)} that would always be zero; pass a larger lmax or leave it out"
            )
        self.query_key = nn.ParameterList(torch.empty(irrep.channels, 2 * heads * count) for irrep in rows_in)
        self.query_key_bias = nn.Parameter(torch.empty(2, heads, count))
        self.value = _maps((irrep.channels, heads * v.channels) for irrep, v in zip(rows_in, values, strict=True))
        self.lows = Tables(functools.partial(_lowest_widths, self.bounds))
        self.octaves = nn.Parameter(torch.empty(heads, num_gaussians + num_coulomb))
        self.gains = nn.Parameter(torch.empty(heads, count, lmax + 1))
        out = zip(rows_out, found, strict=True)
        self.out = _maps((heads * f.channels, irrep.channels) for irrep, f in out) if heads > 1 else None
        self.reset_parameters()
        if self.own_kernels is not None:
            _check_own(self.kernels()[-1])

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
        return {
            "num_gaussians": self.counts[0], "num_coulomb": self.counts[1], "kernels": own,
            "width": float(self.width), "max_width": float(self.max_width), "heads": self.heads,
            "avg_num_nodes": float(self.avg_num_nodes),
        }  # fmt: skip

    def why_not_shared(self) -> str | None:
        return "method='direct', which needs pairs of nodes of two processes" if self.method == "direct" else None

    def neutral_sources(self, num_elements: int, cutoff: float, avg_num_neighbors: float) -> NeutralSources:
        """Make the neutral sources of this layer's Coulomb kernels, for features that have invariants."""
        before = self._invariants()
        sizes = [irrep.size * irrep.channels for irrep in self.product.rows_in]
        charged = slice(sum(sizes[:before]), sum(sizes[: before + 1]))
        scalars, shape = self.rows_in[before].channels, (self.heads, self.counts[1])
        return NeutralSources(num_elements, scalars, shape, charged, sum(sizes), cutoff, avg_num_neighbors)

    def _invariants(self) -> int:
        """The index of the invariants among the irreps of the input."""
        return [irrep.invariant for irrep in self.rows_in].index(True)

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

    def interaction(self, like: Tensor) -> Interaction:
        """The settings of sums over nodes, with tables of the dtype and device of a tensor."""
        return Interaction(self.kernels(), self.product(like), self.error, self.max_hkl)

    def attend(
        self, x: Float[Tensor, "nodes dim_in"], pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch,
        cell: Tensor | None, pbc: Tensor | None, neutral: NeutralSources | None = None, atoms: Atoms | None = None,
    ) -> Float[Tensor, "nodes dim_out"]:  # fmt: skip
        """Attention of nodes, from checked features x and positions, and from cells that are checked here.

        With ``neutral`` sources for ``atoms``, features include elements, a node does not attend to itself, and
        Coulomb kernels use invariant keys only.
        """
        cells, heads = cells_of(cell, pbc, node_batch.count, x), self.heads
        with full_precision(pos.device):
            x = node_batch.zero_padding(x.to(self.octaves.dtype))
            atoms = None if atoms is None else atoms._replace(elements=atoms.elements.to(x.dtype))
            scores, values = [], []
            irreps = zip(self.rows_in, split_rows(x, self.rows_in), self.query_key, self.value, strict=True)
            for irrep, features, score, value in irreps:
                if neutral is not None and atoms is not None and irrep.invariant:
                    features = features + (atoms.elements @ neutral.embedding)[:, None]
                score = (features @ score).unflatten(2, (2, heads, -1)) / math.sqrt(irrep.size)  # T, 2 l + 1, 2, H, C
                scores.append(score + self.query_key_bias if irrep.invariant else score)
                values.append((features @ value).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2))
            if not any(irrep.invariant for irrep in self.rows_in):
                scores.append(self.query_key_bias.expand(pos.shape[0], 1, -1, -1, -1))
            # contiguous: gathers of rows keep the order of strides in some of torch's tracers, and not in others
            query, key = torch.cat(scores, 1).movedim(1, 4).contiguous().unbind(1)  # T, H, C, A
            value = torch.cat(values, 2) / self.avg_num_nodes
            interaction = self.interaction(value)
            terms = []
            for those, part, sources in self._parts(query, key, value, interaction, node_batch, neutral, atoms):
                found = ewald_attention_impl(pos, those, sources, part, node_batch, cells, self.method)
                terms.append(found if neutral is None else found - own_terms(those, sources, part))
            out = sum(terms[1:], terms[0])
            if self.out is None:
                return node_batch.zero_padding(out[:, 0])
            each = zip(split_rows(out, self.product.rows_out), self.out, strict=True)
            mixed = [(features.transpose(1, 2).flatten(2) @ weight).flatten(1) for features, weight in each]
            return node_batch.zero_padding(torch.cat(mixed, 1))

    def _parts(
        self, query: Float[Tensor, "nodes heads kernels contracted"],
        key: Float[Tensor, "nodes heads kernels contracted"], value: Float[Tensor, "nodes heads dim"],
        interaction: Interaction, node_batch: NodeBatch, neutral: NeutralSources | None, atoms: Atoms | None,
    ) -> Iterator[tuple[Float[Tensor, "nodes heads kernels contracted"], Interaction, Sources]]:  # fmt: skip
        """Yield queries, kernels and sources that are summed together: all of them, or Coulomb kernels apart from the
        others if sources are neutral."""
        if neutral is None or atoms is None:
            yield query, interaction, (key, value)
            return
        gaussians, coulomb, _ = self.counts
        last = gaussians + coulomb
        if coulomb:
            row = sum(irrep.size for irrep in self.rows_in[: self._invariants()])
            invariant = query[:, :, gaussians:last, row : row + 1]
            own = neutral(key[:, :, gaussians:last, row : row + 1] * value[:, :, None], atoms, node_batch)
            kernels = tuple(kernel for kernel in interaction.kernels if kernel.long_range)
            yield invariant, interaction.part(kernels), (own,)
        kernels = tuple(kernel for kernel in interaction.kernels if not kernel.long_range)
        if kernels:
            query, key = (torch.cat([x[:, :, :gaussians], x[:, :, last:]], 2) for x in (query, key))
            yield query, interaction.part(kernels), (key, value)


def _check(
    width: float, max_width: float, num_gaussians: int, num_coulomb: int, kernels: nn.Module | None, heads: int,
    lmax: int, error: float, method: str, max_hkl: Sequence[int] | None,
) -> None:  # fmt: skip
    checks.positive_number(max_width=max_width)
    if max_width < 2 * width:
        raise ValueError(f"max_width must be at least an octave above width, {2 * width:g}, got {max_width:g}")
    checks.positive(heads=heads)
    checks.whole(num_gaussians=num_gaussians, num_coulomb=num_coulomb, lmax=lmax)
    if kernels is not None:
        if not isinstance(kernels, nn.Module) or not isinstance(getattr(kernels, "count", None), int):
            raise ValueError(f"kernels must be a module with an integer count, got {checks.described(kernels)}")
    elif not num_gaussians and not num_coulomb:
        raise ValueError("num_gaussians and num_coulomb must not both be 0 without kernels")
    check_method(method, error)
    if max_hkl is not None:
        if not isinstance(max_hkl, Sequence) or len(max_hkl) != 3:
            raise ValueError(f"max_hkl must be three integers, along each lattice vector, got {max_hkl!r}")
        for n in max_hkl:
            checks.positive(max_hkl=n)


def _check_own(kernel: object) -> None:
    """Raise ValueError unless ``kernels`` returned kernels that attention can use."""
    if not isinstance(kernel, Kernel) or kernel.long_range:
        raise ValueError(
            f"kernels must return a tg_equiattn.functional.Kernel without long_range, got {type(kernel).__name__}"
        )


def _bounds(width: float, max_width: float, num_gaussians: int, num_coulomb: int) -> tuple[tuple[float, float], ...]:
    """The octave of each width. Octaves of Gaussians, and of Coulomb kernels, are spread from ``width`` to
    ``max_width``."""
    steps = [n / max(1, count - 1) for count in (num_gaussians, num_coulomb) for n in range(count)]
    lows = [width * (max_width / width / 2) ** step for step in steps]
    return tuple((low, 2 * low) for low in lows)


def _lowest_widths(bounds: tuple[tuple[float, float], ...]) -> Float[Tensor, " kernels"]:
    return torch.tensor([low for low, _ in bounds], dtype=torch.float64)


def _maps(shapes: Iterable[tuple[int, int]]) -> nn.ParameterList:
    return nn.ParameterList(torch.empty(shape) for shape in shapes)
