"""What the modules of Euclidean fast attention share: projections, the kernel, and the map of its output, on rows."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.directions import check_degree, direction_rule
from ...encodings.positions import RADIAL, radial_basis
from ...functional.linear.crystals import Crystals, attention_in_crystals, crystals_of
from ...functional.linear.euclidean_attention import attention_in_sequences, check_options
from ...functional.linear.euclidean_methods import PAIRS_BELOW, EuclideanMethod
from ...sequences import Sequences
from ..children import reset_children
from ..exact_tables import ExactTables
from .spherical_features import Coupling, HarmonicProduct, Irrep, IrrepLinear, split_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class EuclideanOptions:
    """Of Euclidean fast attention.

    Args:
        max_radius: the largest distance of two points of a cloud, in the unit of positions.
        max_frequency: the largest phase, that of the highest frequency at ``max_radius``, in radians.
        heads: of attention.
        qk_channels: of query and key, of each head, degree and parity; even, as they come in pairs of a frequency.
        qk_lmax: the highest degree of queries and keys.
        lmax: the highest degree of harmonics.
        learn_frequencies: whether each head learns its frequencies, between 0 and the largest.
        reduce: ``"sum"`` or ``"mean"``.
        num_nodes: of a typical cloud; sums are divided by it.
        method: ``"auto"``, ``"directions"`` or ``"pairs"``.
        error: promised for the kernels by directions.
        backend: ``"auto"``, ``"torch"`` or ``"plain"``.
        max_wavenumber: of the waves of crystals, which end there smoothly; ``None`` for open clouds alone.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    max_radius: float
    max_frequency: float = math.pi
    heads: int = 1
    qk_channels: int = 16
    qk_lmax: int = 0
    lmax: int = 1
    learn_frequencies: bool = False
    reduce: str = "sum"
    num_nodes: float | None = None
    method: str = "auto"
    error: float = 1e-6
    backend: str = "auto"
    max_wavenumber: float | None = None

    def __post_init__(self) -> None:
        if self.max_wavenumber is not None:
            checks.positive_number(max_wavenumber=self.max_wavenumber)
        checks.positive_number(max_radius=self.max_radius, max_frequency=self.max_frequency, error=self.error)
        checks.positive(heads=self.heads, qk_channels=self.qk_channels)
        if self.qk_channels % 2:
            raise ValueError(f"qk_channels must be even, two for each frequency, got {self.qk_channels}")
        check_degree(lmax=self.lmax, qk_lmax=self.qk_lmax)
        check_options(self.reduce, self.method, self.backend)
        if self.num_nodes is not None:
            checks.positive_number(num_nodes=self.num_nodes)
            if self.reduce != "sum":
                raise ValueError(f"num_nodes must be None with reduce={self.reduce!r}, got {self.num_nodes}")

    def why_not_shared(self) -> str | None:
        """What does not allow the nodes of a graph to be shared among processes, if anything."""
        return "method='pairs', whose pairs may be of two processes" if self.method == "pairs" else None

    def frequencies(self) -> Tensor:
        """Those of a head at the start (F,), in float64."""
        count = self.qk_channels // 2
        highest = self.max_frequency / self.max_radius
        return torch.linspace(0 if count > 1 else highest, highest, count, dtype=torch.float64)


class EuclideanNetwork(ExactTables):
    """Query, key and value of each node; Euclidean fast attention; with several heads, a map of what they found.

    Works on rows (rows, T), ordered by irrep, then component, then channel.

    Args:
        inside, outside: features of a node, each degree and parity once.
        coupling: of three degrees, see :class:`HarmonicProduct`.
        options: of attention.
        name: what an error calls the output.
    """

    frequencies: Tensor
    directions: Tensor
    weights: Tensor

    def __init__(
        self,
        inside: Sequence[Irrep],
        outside: Sequence[Irrep],
        coupling: Coupling,
        options: EuclideanOptions,
        name: Callable[[Irrep], str],
    ) -> None:
        super().__init__()
        self.inside, self.outside, self.options = tuple(inside), tuple(outside), options
        heads = options.heads
        given = [irrep for irrep in inside if irrep.channels]
        wanted = [irrep for irrep in outside if irrep.channels]
        values = [irrep.with_channels(-(-irrep.channels // heads)) for irrep in given]
        found = [irrep.with_channels(-(-irrep.channels // heads)) for irrep in wanted]
        self.product = HarmonicProduct(values, found, options.lmax, heads, coupling)
        missing = self.product.missing()
        if missing:
            raise ValueError(
                f"{name(missing[0])} must be reachable from the input by products with harmonics up to "
                f"lmax={options.lmax}, got {missing[0].channels} channels or more that would always be zero"
            )
        scores = [irrep for irrep in given if irrep.degree <= options.qk_lmax and irrep[:2] != (0, 1)]
        channels = 2 * heads * options.qk_channels
        scores = [irrep.with_channels(channels) for irrep in (Irrep(0, 1, 0), *scores)]
        self.query_key = IrrepLinear(given, scores, bias=True)
        self.value = IrrepLinear(given, [irrep.with_channels(heads * irrep.channels) for irrep in values])
        found = [irrep.with_channels(heads * irrep.channels) for irrep in found]
        self.out = IrrepLinear(found, wanted) if heads > 1 else None
        if options.method != "pairs":
            directions, weights = direction_rule(options.max_frequency, options.lmax, options.error)
            self.add_table("directions", directions)
            self.add_table("weights", weights)
        if options.learn_frequencies:
            self.frequencies = nn.Parameter(torch.empty(heads, options.qk_channels // 2))
            self._reset_frequencies()
        else:
            self.add_table("frequencies", options.frequencies())
        self.wave_weights: nn.Parameter | None = None
        if options.max_wavenumber is not None:
            self.wave_weights = nn.Parameter(torch.empty(heads, options.qk_channels // 2, RADIAL))
            nn.init.normal_(self.wave_weights)
        self._warned = False

    def reset_parameters(self) -> None:
        reset_children(self)
        if self.wave_weights is not None:
            nn.init.normal_(self.wave_weights)
        if self.options.learn_frequencies:
            self._reset_frequencies()

    def _reset_frequencies(self) -> None:
        with torch.no_grad():
            self.frequencies.copy_(self.options.frequencies())

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return next(self.query_key.parameters())

    def forward(
        self, x: Tensor, pos: Tensor, sequences: Sequences, edges: object = None, crystals: Crystals | None = None
    ) -> Tensor:
        """Rows (rows, T) and positions (3, T) relative to the mean of their cloud, to rows (rows, T)."""
        options, heads = self.options, self.options.heads
        frequencies = self._bounded_frequencies() if options.learn_frequencies else self.frequencies[None]
        parts = [part for irrep, part in zip(self.inside, split_rows(x, self.inside), strict=True) if irrep.channels]
        scores = [part.unflatten(1, (2, heads, -1, 2)).movedim(0, 4) for part in self.query_key(parts)]
        query, key = torch.cat(scores, 4).unbind(0)
        values = [part.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2) for part in self.value(parts)]
        value = torch.cat(values, 1)
        if options.num_nodes is not None:
            value = value / options.num_nodes
        rule = None if options.method == "pairs" else (self.directions, self.weights)
        method = EuclideanMethod(self.product, options.lmax, rule, options.method, options.backend, sequences.ranks)
        out = self._attend(method, pos, query, key, value, frequencies, sequences, crystals)
        if self.out is None:
            return out.flatten(0, 1)
        own = [irrep.rows for irrep in self.product.outside]
        found = zip(out.split(own, 1), self.product.outside, strict=True)
        merged = self.out([x.unflatten(1, (irrep.size, -1)).transpose(0, 1).flatten(1, 2) for x, irrep in found])
        return torch.cat([part.flatten(0, 1) for part in merged])

    def crystals(
        self, cell: Tensor | None, wave_numbers: Tensor | None, sequences: Sequences, like: Tensor
    ) -> Crystals | None:
        """Of cells as users give them; ValueError where they do not fit."""
        if cell is None and wave_numbers is not None:
            raise ValueError("wave_numbers must be None without cell, got a tensor")
        if cell is None:
            return None
        if self.options.max_wavenumber is None:
            raise ValueError("max_wavenumber must be given to the module for graphs with a cell, got None")
        return crystals_of(cell, self.options.max_wavenumber, sequences.count, like, wave_numbers)

    def _attend(
        self, method: EuclideanMethod, pos: Tensor, query: Tensor, key: Tensor, value: Tensor, frequencies: Tensor,
        sequences: Sequences, crystals: Crystals | None,
    ) -> Tensor:  # fmt: skip
        """Of clouds, or of crystals, or of each kind among graphs of both."""
        reduce, closed = self.options.reduce, None
        if crystals is not None and crystals.numbers.shape[1]:  # none where all clouds are open
            weights = self._weights_of_waves(crystals, value.dtype)
            inside = attention_in_crystals(method, pos, query, key, value, weights, sequences, crystals, reduce)
            if checks.values_are_free(crystals.closed) and bool(crystals.closed.all()):
                return inside
            closed = crystals.closed[sequences.batch]
            pos = torch.where(closed, 0.0, pos)
        self._warn_of_wide_clouds(pos, sequences)
        out = attention_in_sequences(method, pos, query, key, value, frequencies, sequences, reduce)
        return out if closed is None else torch.where(closed, inside, out)

    def _weights_of_waves(self, crystals: Crystals, dtype: torch.dtype) -> Tensor:
        """(B, H, D, F): functions of the wavenumber, which end at the largest with all their derivatives, divided by
        the number of waves in a unit of volume."""
        highest, wavevectors = cast(float, self.options.max_wavenumber), crystals.wavevectors
        basis = radial_basis(wavevectors, highest, RADIAL)
        square = (wavevectors / highest).square().sum(2)
        inside = square < 1
        envelope = torch.where(inside, (1 - 1 / (1 - torch.where(inside, square, 0.0))).exp(), 0.0)
        basis = (basis * envelope[..., None] * (6 * math.pi**2 / highest**3)).to(dtype)
        return torch.einsum("bdn,hfn->bhdf", basis, cast(Tensor, self.wave_weights).to(dtype))

    def _bounded_frequencies(self) -> Tensor:
        """What was learned, reflected at 0 and at the highest that the promise holds for: no gradient ends there."""
        highest = self.options.max_frequency / self.options.max_radius
        wound = self.frequencies.remainder(2 * highest)
        return torch.where(wound <= highest, wound, 2 * highest - wound)

    def _warn_of_wide_clouds(self, pos: Tensor, sequences: Sequences) -> None:
        """Warn once of clouds wider than the promise holds for; their width is found up to a tenth."""
        options = self.options
        ranks = sequences.ranks  # which may have been warned before, some of them, and have to find the width together
        if (self._warned and ranks is None) or options.method == "pairs" or not checks.values_are_free(pos):
            return
        if ranks is None and pos.shape[1] < (PAIRS_BELOW if options.method == "auto" else 1):
            return
        ways = pos.detach().new_tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [1, 1, -1], [1, -1, 1], [-1, 1, 1]])
        along = (ways / ways.norm(dim=1, keepdim=True)) @ pos.detach()
        ends = along.new_zeros(2, len(ways), sequences.count)
        index = sequences.batch.expand_as(along)
        for end, values in zip(ends, (along, -along), strict=True):
            end.scatter_reduce_(1, index, values, "amax")
        ends = ends if ranks is None else ranks.largest(ends)
        width = float(ends.sum(0).max())
        if width > options.max_radius * (1 + 1e-6) and not self._warned:
            self._warned = True
            warnings.warn(
                f"a cloud is {width:.3g} wide, more than max_radius={options.max_radius:g}: for pairs farther apart "
                f"than that, attention by directions is neither equivariant nor exact to error={options.error:g}",
                stacklevel=2,
            )
