"""Ewald attention of features in a fixed layout: projections of nodes, kernels of learned widths, and their sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...functional.waves.cells import cells_of
from ...functional.waves.coulomb import Coulomb
from ...functional.waves.ewald_attention import attention_of_nodes
from ...functional.waves.gaussian import Gaussian, OscillatingGaussian
from ...functional.waves.interaction import EwaldNodes, Interaction
from ...functional.waves.kernel import Kernel
from ...modes import full_precision
from ...node_batch import NodeBatch
from ...tables import Tables
from ..modules import StoresSettings, reset_children
from .options import EwaldOptions
from .spherical_features import Coupling, HarmonicProduct, Irrep

_CONTENT = 0.1  # size of the part of queries and keys that depends on features, at the start, beside a constant 1


class EwaldNetwork(StoresSettings):
    """Query, key and value of each node; attention through kernels; with several heads a linear map of what they found.

    Features are rows of irreps, each degree and parity once, in rising order, components before channels. At the start
    queries and keys of invariants are near 1, others near 0.
    """

    def __init__(
        self, irreps_in: Sequence[Irrep], irreps_out: Sequence[Irrep], coupling: Coupling, options: EwaldOptions,
        name: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options, self.irreps_in, self.irreps_out = options, tuple(irreps_in), tuple(irreps_out)
        heads, count = options.heads, sum(options.counts)
        values, found = ([irrep.shared(heads) for irrep in irreps] for irreps in (irreps_in, irreps_out))
        self.product = HarmonicProduct(values, found, options.lmax, heads, coupling)
        for b, irrep in enumerate(found):
            if not any(b == path[2] for path in self.product.paths):
                raise ValueError(
                    f"{name} must be reachable from the input by products with harmonics up to "
                    f"lmax={options.lmax}, got {irrep.channels} channels or more that would always be zero"
                )
        self.query_key = nn.ParameterList(torch.empty(irrep.channels, 2 * heads * count) for irrep in irreps_in)
        self.query_key_bias = nn.Parameter(torch.empty(2, heads, count))
        self.value = _maps((irrep.channels, heads * v.channels) for irrep, v in zip(irreps_in, values, strict=True))
        self._bounds = options.bounds
        self.lows = Tables(functools.partial(_lowest_widths, self._bounds))
        self.octaves = nn.Parameter(torch.empty(heads, count))
        oscillating = options.num_oscillating
        self.bands = nn.Parameter(torch.empty(heads, oscillating)) if oscillating else None
        self.gains = nn.Parameter(torch.empty(heads, count, options.lmax + 1))
        out = zip(irreps_out, found, strict=True)
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
        return {
            "num_gaussians": options.num_gaussians, "num_coulomb": options.num_coulomb,
            "num_oscillating": options.num_oscillating, "width": options.width, "max_width": options.max_width,
            "heads": options.heads, "avg_num_nodes": float(options.avg_num_nodes),
        }  # fmt: skip

    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels of each kind, with widths within their octaves and wavenumbers within their bands."""
        counts, bounds, band = self.options.counts, self._bounds, self.options.band
        lows = self.lows(self.octaves.device, self.octaves.dtype)
        widths, gains = (lows * torch.exp2(self.octaves.sigmoid())).split(counts, 1), self.gains.split(counts, 1)
        first, last = counts[0], counts[0] + counts[1]
        out: list[Kernel] = []
        if counts[0]:
            out.append(Gaussian(widths[0], gains[0], bounds[:first]))
        if counts[1]:
            out.append(Coulomb(widths[1], gains[1], bounds[first:last]))
        if self.bands is not None:
            wavenumbers = band * (torch.arange(counts[2], device=self.bands.device) + self.bands.sigmoid())
            largest = tuple(band * (n + 1) for n in range(counts[2]))
            out.append(OscillatingGaussian(widths[2], gains[2], bounds[last:], wavenumbers, largest))
        return tuple(out)

    def forward(self, x: Tensor, pos: Tensor, node_batch: NodeBatch, cell: Tensor | None, pbc: Tensor | None) -> Tensor:
        """Features ``(T, dim)`` and positions ``(T, 3)`` of nodes, and cells, to features: checked except for cells."""
        cells, heads = cells_of(cell, pbc, node_batch.count, x), self.options.heads
        with full_precision(pos.device):
            x = node_batch.zero_padding(x.to(self.octaves.dtype))
            scores, values = [], []
            blocks = x.split([irrep.rows for irrep in self.irreps_in], 1)
            for irrep, block, score, value in zip(self.irreps_in, blocks, self.query_key, self.value, strict=True):
                components = block.unflatten(1, (irrep.size, irrep.channels))
                score = (components @ score).unflatten(2, (2, heads, -1)) / math.sqrt(irrep.size)  # T, 2 l + 1, 2, H, C
                scores.append(score + self.query_key_bias if irrep.invariant else score)
                values.append((components @ value).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2))
            if not any(irrep.invariant for irrep in self.irreps_in):
                scores.append(self.query_key_bias.expand(pos.shape[0], 1, -1, -1, -1))
            query, key = torch.cat(scores, 1).movedim(1, 4).unbind(1)  # T, H, C, A
            nodes = EwaldNodes(pos, query, key, torch.cat(values, 2) / self.options.avg_num_nodes)
            interaction = Interaction(self.kernels(), self.product, self.options.error, self.options.max_hkl)
            found = attention_of_nodes(nodes, interaction, node_batch, cells, self.options.method)
            if self.out is None:
                return node_batch.zero_padding(found[:, 0])
            blocks = found.split([irrep.rows for irrep in self.product.outside], 2)
            out = []
            for irrep, block, weight in zip(self.irreps_out, blocks, self.out, strict=True):
                components = block.unflatten(2, (irrep.size, -1)).transpose(1, 2).flatten(2)
                out.append((components @ weight).flatten(1))
            return node_batch.zero_padding(torch.cat(out, 1))


def _maps(shapes: Iterable[tuple[int, int]]) -> nn.ParameterList:
    return nn.ParameterList(torch.empty(shape) for shape in shapes)


def _lowest_widths(bounds: tuple[tuple[float, float], ...]) -> Tensor:
    return torch.tensor([low for low, _ in bounds], dtype=torch.float64)
