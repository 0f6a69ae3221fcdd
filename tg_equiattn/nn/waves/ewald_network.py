"""What Ewald attention of scalars and vectors and that of irreps share: options, projections, kernels, the sums."""

# No strings for annotations: torch.package, which takes models along with their code, cannot load dataclasses then.

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.waves.ewald_attention import METHODS, attention_of_nodes
from ...functional.waves.kernels import EwaldKernels, EwaldNodes
from ...functional.waves.lattices import cells_of
from ...modes import full_precision
from ...ragged import Ragged
from ...ranks import Shared
from ...tables import Tables
from ..modules import NotScriptable, StoresSettings, reset_children
from .spherical_features import Coupling, HarmonicProduct, Irrep

_CONTENT = 0.1  # how much of queries and keys hangs on features at the start, where the rest is 1


@dataclasses.dataclass(frozen=True)
class EwaldOptions:
    """Of a layer, as :class:`EwaldAttention` has them."""

    width: float
    max_width: float | None
    kernels: int | tuple[int, ...]
    heads: int
    lmax: int
    avg_num_nodes: float
    error: float
    method: str
    max_waves: tuple[int, int, int] | None

    def __post_init__(self) -> None:
        checks.positive_number(width=self.width, avg_num_nodes=self.avg_num_nodes)
        if self.max_width is not None:
            checks.positive_number(max_width=self.max_width)
            if self.max_width < 2 * self.width:
                raise ValueError(
                    f"max_width must be at least an octave above width, {2 * self.width:g}, got {self.max_width:g}"
                )
        checks.positive(heads=self.heads, kernels=1 if isinstance(self.kernels, tuple) else self.kernels)
        if len(self.counts) != 3 or not all(isinstance(n, int) and n >= 0 for n in self.counts) or not any(self.counts):
            raise ValueError(
                "kernels must be a number, or of Gaussians, of potentials and, perhaps, of ripples, "
                f"got {self.kernels!r}"
            )
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
    def counts(self) -> tuple[int, ...]:
        """Of Gaussians, of potentials and of ripples."""
        if isinstance(self.kernels, tuple):
            return (*self.kernels, 0) if len(self.kernels) == 2 else self.kernels
        return (self.kernels + 1) // 2, self.kernels // 2, 0

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """The octave of each kernel: the first from ``width`` on, the last up to ``max_width``, as are all ripples."""
        ratio = (8.0 if self.max_width is None else self.max_width / self.width) / 2
        gaussians, potentials, ripples = self.counts
        steps = [n / max(1, count - 1) for count in (gaussians, potentials) for n in range(count)]
        lows = [self.width * ratio**step for step in (*steps, *[1.0] * ripples)]
        return tuple((low, 2 * low) for low in lows)

    @property
    def bands(self) -> tuple[tuple[float, float], ...]:
        """The least and the largest wavenumber of each ripple: those whose wavelength is above 4/3 ``width``, divided
        among them."""
        count, largest = self.counts[2], 1.5 * math.pi / self.width
        return tuple((n * largest / count, (n + 1) * largest / count) for n in range(count))


class EwaldNetwork(StoresSettings):
    """Query, key and value of each node, of features in blocks of irreps; attention through kernels; with several heads
    a map of what they found. At the start queries and keys of invariants are near 1, others near 0."""

    def __init__(
        self, given: Sequence[Irrep], wanted: Sequence[Irrep], coupling: Coupling, options: EwaldOptions, name: str
    ) -> None:
        super().__init__()
        self.options, self.given, self.wanted = options, tuple(given), tuple(wanted)
        self.inside, self.outside = _each_once(given), _each_once(wanted)
        heads, count = options.heads, sum(options.counts)
        values, found = ([irrep.shared(heads) for irrep in irreps] for irreps in (self.inside, self.outside))
        self.product = HarmonicProduct(values, found, options.lmax, heads, coupling)
        for b, irrep in enumerate(found):
            if not any(b == path[2] for path in self.product.paths):
                raise ValueError(
                    f"{name} must be reachable from the input by products with harmonics up to "
                    f"lmax={options.lmax}, got {irrep.channels} channels or more that would always be zero"
                )
        self.query_key = nn.ParameterList(torch.empty(irrep.channels, 2 * heads * count) for irrep in self.inside)
        self.query_key_bias = nn.Parameter(torch.empty(2, heads, count))
        self.value = _maps((irrep.channels, heads * v.channels) for irrep, v in zip(self.inside, values, strict=True))
        self._bounds = options.bounds
        self.lows = Tables(functools.partial(_lowest_widths, self._bounds))
        self.octaves = nn.Parameter(torch.empty(heads, count))
        self.bands = nn.Parameter(torch.empty(heads, options.counts[2])) if options.counts[2] else None
        self.gains = nn.Parameter(torch.empty(heads, count, options.lmax + 1))
        out = zip(self.outside, found, strict=True)
        self.out = _maps((heads * f.channels, irrep.channels) for irrep, f in out) if heads > 1 else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        for weight in self.query_key:
            nn.init.normal_(weight, std=_CONTENT * weight.shape[0] ** -0.5)
        for weight in [*self.value, *(self.out or ())]:
            nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
        nn.init.ones_(self.query_key_bias)
        nn.init.zeros_(self.octaves)
        if self.bands is not None:
            nn.init.zeros_(self.bands)
        nn.init.constant_(self.gains, self.octaves.shape[1] ** -0.5)

    def settings(self) -> dict[str, Any]:
        options = self.options
        bounds = [round(low, 6) for low, _ in self._bounds]
        return {
            "kernels": str(options.counts), "width": options.width, "widths": str(bounds), "heads": options.heads,
            "avg_num_nodes": float(options.avg_num_nodes),
        }  # fmt: skip

    def kernels(self) -> EwaldKernels:
        """As they are now: each width within its octave, each wavenumber within its band."""
        options, lows = self.options, self.lows(self.octaves.device, self.octaves.dtype)
        widths = lows * torch.exp2(self.octaves.sigmoid())
        given = (widths, self.gains, self._bounds, options.counts[0], options.error, options.max_waves)
        if self.bands is None:
            return EwaldKernels(*given)
        fastest = tuple(high for _, high in options.bands)
        lows = self.bands.new_tensor([low for low, _ in options.bands])
        return EwaldKernels(*given, lows + fastest[0] * self.bands.sigmoid(), fastest)

    def forward(
        self, blocks: Sequence[Tensor], pos: Tensor, ragged: Ragged, cell: Tensor | None, pbc: Tensor | None
    ) -> list[Tensor]:
        """Features ``(T, channels, 2 l + 1)`` of nodes, a block of each of the given irreps, positions ``(T, 3)`` and
        what repeats, to features of nodes: checked but for cells."""
        cells, heads = cells_of(cell, pbc, ragged.count, blocks[0]), self.options.heads
        with full_precision(pos.device):
            blocks = [ragged.zero_padding(x.to(self.octaves.dtype)) for x in blocks]
            scores, values = [], []
            for irrep, score, value in zip(self.inside, self.query_key, self.value, strict=True):
                own = [x for x, other in zip(blocks, self.given, strict=True) if other[:2] == irrep[:2]]
                x = (own[0] if len(own) == 1 else torch.cat(own, 1)).mT  # T, 2 l + 1, channels
                score = (x @ score).unflatten(2, (2, heads, -1)) / math.sqrt(irrep.size)  # T, 2 l + 1, 2, H, C
                scores.append(score + self.query_key_bias if irrep[:2] == (0, 1) else score)
                values.append((x @ value).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2))
            if not any(irrep[:2] == (0, 1) for irrep in self.inside):
                scores.append(self.query_key_bias.expand(pos.shape[0], 1, -1, -1, -1))
            query, key = torch.cat(scores, 1).movedim(1, 4).unbind(1)  # T, H, C, A
            nodes = EwaldNodes(pos, query, key, torch.cat(values, 2) / self.options.avg_num_nodes)
            out = attention_of_nodes(nodes, self.kernels(), ragged, cells, self.product, self.options.method)
            found: dict[tuple[int, int], list[Tensor]] = {}
            parts = out.split([irrep.rows for irrep in self.product.outside], 2)
            for n, (irrep, x) in enumerate(zip(self.outside, parts, strict=True)):
                x = x.unflatten(2, (irrep.size, -1)).transpose(1, 2).flatten(2)
                x = ragged.zero_padding(x if self.out is None else x @ self.out[n]).mT
                channels = [other.channels for other in self.wanted if other[:2] == irrep[:2]]
                found[irrep[:2]] = list(x.split(channels, 1))
            none = out.new_zeros(out.shape[0], 0, 1)
            return [(found[i[:2]].pop(0) if i[:2] in found else none.expand(-1, -1, i.size)) for i in self.wanted]


class EwaldLayer(Shared, NotScriptable, nn.Module):
    """What users call: the network on what they give as features."""

    def __init__(self, network: EwaldNetwork) -> None:
        super().__init__()
        self.attention = network

    def why_not_shared(self) -> str | None:
        pairs = self.attention.options.method == "pairs"
        return "method='pairs', whose pairs may be of two processes" if pairs else None

    def reset_parameters(self) -> None:
        self.attention.reset_parameters()


def _lowest_widths(bounds: tuple[tuple[float, float], ...]) -> Tensor:
    return torch.tensor([low for low, _ in bounds], dtype=torch.float64)


def _each_once(irreps: Sequence[Irrep]) -> tuple[Irrep, ...]:
    """Each degree and parity that has channels, with all of them."""
    channels: collections.Counter[tuple[int, int]] = collections.Counter()
    for irrep in irreps:
        channels[irrep.degree, irrep.parity] += irrep.channels
    return tuple(Irrep(*kind, count) for kind, count in sorted(channels.items()) if count)


def _maps(shapes: Iterable[tuple[int, int]]) -> nn.ParameterList:
    return nn.ParameterList(torch.empty(shape) for shape in shapes)
