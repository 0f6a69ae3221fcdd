"""What the modules of Ewald attention share: projections, kernels, the sums, and the map of what they find."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.waves.ewald_attention import METHODS, attention_of_nodes
from ...functional.waves.kernels import EwaldKernels, largest_phase, waves_of_kernels
from ...functional.waves.lattices import Cells
from ...ragged import Ragged
from ..children import reset_children
from ..exact_tables import ExactTables
from .spherical_features import Coupling, HarmonicProduct, Irrep


@dataclasses.dataclass(frozen=True, kw_only=True)
class EwaldOptions:
    """Of Ewald attention.

    Args:
        width: of the narrowest kernel at its least, in the unit of positions.
        max_width: of the widest at its most; ``None`` means eight times ``width``.
        kernels: how many, half of them Gaussians and half potentials, or a pair of numbers of each.
        heads: of attention.
        lmax: the highest degree of harmonics.
        avg_num_nodes: by which sums are divided, the same for all graphs.
        error: what is promised of sums by waves, relative to a kernel's largest value.
        method: ``"auto"``, ``"pairs"``, ``"waves"`` or ``"mesh"``.
        max_waves: bounds of wave numbers along the three lattice vectors, for the narrowest kernel.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    width: float
    max_width: float | None = None
    kernels: int | tuple[int, int] = 8
    heads: int = 1
    lmax: int = 1
    avg_num_nodes: float = 1.0
    error: float = 1e-4
    method: str = "auto"
    max_waves: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        checks.positive_number(width=self.width, avg_num_nodes=self.avg_num_nodes)
        if self.max_width is not None:
            checks.positive_number(max_width=self.max_width)
            if self.max_width < 2 * self.width:
                raise ValueError(
                    f"max_width must be at least an octave above width, {2 * self.width:g}, got {self.max_width:g}"
                )
        if isinstance(self.kernels, tuple):
            fits = len(self.kernels) == 2 and all(isinstance(n, int) and n >= 0 for n in self.kernels)
            if not fits or not sum(self.kernels):
                raise ValueError(f"kernels must be a number, or of Gaussians and of potentials, got {self.kernels!r}")
        else:
            checks.positive(kernels=self.kernels)
        checks.positive(heads=self.heads)
        if isinstance(self.lmax, bool) or not isinstance(self.lmax, int) or self.lmax < 0:
            raise ValueError(f"lmax must be an integer from 0 on, got {self.lmax!r}")
        if not isinstance(self.error, float) or not 1e-14 <= self.error <= 0.1:
            raise ValueError(f"error must be in [1e-14, 0.1], got {self.error!r}")
        checks.choice("method", self.method, METHODS)
        if self.max_waves is not None:
            if not isinstance(self.max_waves, (tuple, list)) or len(self.max_waves) != 3:
                raise ValueError(f"max_waves must be three numbers, along each lattice vector, got {self.max_waves!r}")
            for n in self.max_waves:
                checks.positive(max_waves=n)

    @property
    def counts(self) -> tuple[int, int]:
        """Of Gaussians and of potentials."""
        return self.kernels if isinstance(self.kernels, tuple) else ((self.kernels + 1) // 2, self.kernels // 2)

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """The octave of each kernel: the first from ``width`` on, the last up to ``max_width``."""
        ratio = (8.0 if self.max_width is None else self.max_width / self.width) / 2
        lows = [self.width * ratio ** (n / max(1, count - 1)) for count in self.counts for n in range(count)]
        return tuple((low, 2 * low) for low in lows)

    def why_not_shared(self) -> str | None:
        """What does not allow the nodes of a graph to be shared among processes, if anything."""
        return "method='pairs', whose pairs may be of two processes" if self.method == "pairs" else None


class EwaldNetwork(ExactTables):
    """Query, key and value of each node; attention through kernels; with several heads, a map of what they found.

    Features are lists of ``(T, 2 l + 1, channels)``, one an irrep.

    A new layer gives potentials and fields of its values: queries and keys of invariants are near 1, others near 0.

    Args:
        inside, outside: features of a node, each degree and parity once.
        coupling: of three degrees, see :class:`HarmonicProduct`.
        options: of attention.
        name: what an error calls the output.
    """

    lows: Tensor

    def __init__(
        self,
        inside: Sequence[Irrep],
        outside: Sequence[Irrep],
        coupling: Coupling,
        options: EwaldOptions,
        name: Callable[[Irrep], str],
    ) -> None:
        super().__init__()
        self.options = options
        self.inside = tuple(irrep for irrep in inside if irrep.channels)
        self.outside = tuple(irrep for irrep in outside if irrep.channels)
        heads, count = options.heads, sum(options.counts)
        values = [irrep.with_channels(-(-irrep.channels // heads)) for irrep in self.inside]
        found = [irrep.with_channels(-(-irrep.channels // heads)) for irrep in self.outside]
        self.product = HarmonicProduct(values, found, options.lmax, heads, coupling)
        missing = self.product.missing()
        if missing:
            raise ValueError(
                f"{name(missing[0])} must be reachable from the input by products with harmonics up to "
                f"lmax={options.lmax}, got {missing[0].channels} channels or more that would always be zero"
            )
        self.query_key = nn.ParameterList(torch.empty(irrep.channels, 2 * heads * count) for irrep in self.inside)
        self.query_key_bias = nn.Parameter(torch.empty(2, heads, count))
        self.value = nn.ParameterList(torch.empty(irrep.channels, heads * v.channels) for irrep, v in
                                      zip(self.inside, values, strict=True))  # fmt: skip
        self._bounds, self._phase = options.bounds, largest_phase(options.error, options.lmax)
        self._max_waves = waves_of_kernels(options.max_waves, self._bounds)
        self.add_table("lows", torch.tensor([low for low, _ in self._bounds], dtype=torch.float64))
        self.octaves = nn.Parameter(torch.empty(heads, count))
        self.gains = nn.Parameter(torch.empty(heads, count, options.lmax + 1))
        self.out = None
        if heads > 1:
            self.out = nn.ParameterList(torch.empty(heads * f.channels, irrep.channels) for irrep, f in
                                        zip(self.outside, found, strict=True))  # fmt: skip
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        for weight in self.query_key:
            nn.init.normal_(weight, std=CONTENT * weight.shape[0] ** -0.5)
        for weight in [*self.value, *(self.out or ())]:
            nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
        nn.init.ones_(self.query_key_bias)
        nn.init.zeros_(self.octaves)
        nn.init.constant_(self.gains, self.octaves.shape[1] ** -0.5)

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return self.octaves

    def kernels(self) -> EwaldKernels:
        """As they are now: each width within its octave."""
        widths = self.lows * torch.exp2(self.octaves.sigmoid())
        options = self.options
        return EwaldKernels(widths, self.gains, self._bounds, options.counts[0], options.error, self._phase)

    def forward(self, parts: Sequence[Tensor], pos: Tensor, ragged: Ragged, cells: Cells | None) -> list[Tensor]:
        """Features of nodes, their positions (T, 3) and what repeats, to features of nodes."""
        heads, nodes = self.options.heads, pos.shape[0]
        scores, values = [], []
        for irrep, part, score, value in zip(self.inside, parts, self.query_key, self.value, strict=True):
            score = (part @ score).unflatten(2, (2, heads, -1)) / math.sqrt(irrep.size)  # T, 2 l + 1, 2, H, C
            if irrep[:2] == (0, 1):
                score = score + self.query_key_bias
            scores.append(score)
            values.append((part @ value).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2))
        if not any(irrep[:2] == (0, 1) for irrep in self.inside):
            scores.append(self.query_key_bias.expand(nodes, 1, -1, -1, -1))
        query, key = torch.cat(scores, 1).movedim(1, 4).unbind(1)  # T, H, C, A
        value = torch.cat(values, 2) / self.options.avg_num_nodes
        options = self.options
        out = attention_of_nodes(
            query, key, value, pos, self.kernels(), ragged, cells, self.product, options.method, self._max_waves
        )
        own = [irrep.rows for irrep in self.product.outside]
        found = [
            x.unflatten(2, (irrep.size, -1)).transpose(1, 2).flatten(2)
            for x, irrep in zip(out.split(own, 2), self.product.outside, strict=True)
        ]
        if self.out is None:
            return found
        return [x @ weight for x, weight in zip(found, self.out, strict=True)]


CONTENT = 0.1  # how much of queries and keys hangs on features at the start, where the rest is 1
