"""Message passing of e3nn's own layers between near points."""

from __future__ import annotations

import math

import torch
from e3nn import o3
from e3nn.math import soft_one_hot_linspace, soft_unit_step
from e3nn.nn import FullyConnectedNet, Gate
from torch import Tensor, nn

HIDDEN = o3.Irreps("16x0e + 8x1o")
SOFT = 0.25


class MessagePassing(nn.Module):
    """Tensor products with spherical harmonics of the edge, weights from its length, a mean, and a Gate.

    Args:
        irreps_in: of the points' features; :data:`HIDDEN` come out.
        radius: length of the longest edges, up to which eight Gaussians tell lengths apart.
    """

    def __init__(self, irreps_in: o3.Irreps, radius: float) -> None:
        super().__init__()
        self.radius, self.harmonics = radius, o3.Irreps("0e + 1o + 2e")
        scalars, gated = o3.Irreps("16x0e"), o3.Irreps("8x1o")
        self.gate = Gate(scalars, [torch.nn.functional.silu], "8x0e", [torch.sigmoid], gated)
        self.self_connection = o3.Linear(irreps_in, self.gate.irreps_in)
        self.product = o3.FullyConnectedTensorProduct(
            irreps_in, self.harmonics, self.gate.irreps_in, shared_weights=False
        )
        self.weights = FullyConnectedNet([8, 32, self.product.weight_numel], torch.nn.functional.silu)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        edge = pos[source] - pos[target]
        bumps = torch.linspace(0, self.radius, 8, dtype=x.dtype, device=x.device)
        radial = (-((edge.norm(dim=1)[:, None] - bumps) * 4 / self.radius).square()).exp()
        harmonics = o3.spherical_harmonics(self.harmonics, edge, normalize=True, normalization="component")
        messages = self.product(x[source], harmonics, self.weights(radial))
        degree = torch.zeros_like(x[:, 0]).index_add_(0, target, torch.ones_like(x[source, 0])).clamp(min=1)
        mean = messages.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages) / degree[:, None]
        return self.gate(self.self_connection(x) + mean)


class ChannelwiseMessagePassing(nn.Module):
    """Messages of NequIP: channel by channel, which is cheaper, and smooth.

    Tensor products of each channel with spherical harmonics of the edge and weights from its length, a sum, a Linear
    and a Gate. Weights and all their derivatives are zero at the cutoff, if there is one; lengths are softened,
    sqrt(r^2 + SOFT^2), as lengths and directions have no derivative where points meet.

    Args:
        irreps_in: of the points' features; :data:`HIDDEN` come out.
        radius: length of the longest edges, up to which ``bumps`` functions tell lengths apart.
        neighbors: of a point as a rule; sums are divided by the root of it.
        bumps: how many.
        cutoff: False where ``radius`` leaves out no edge.
    """

    def __init__(
        self, irreps_in: o3.Irreps, radius: float, neighbors: float, bumps: int = 5, cutoff: bool = True
    ) -> None:
        super().__init__()
        self.radius, self.neighbors, self.bumps, self.cutoff = radius, neighbors, bumps, cutoff
        self.harmonics = o3.Irreps("0e + 1o + 2e")
        self.gate = Gate("16x0e", [torch.nn.functional.silu], "8x0e", [torch.sigmoid], "8x1o")
        instructions, found = [], o3.Irreps()
        for i, (mul, ir) in enumerate(irreps_in):
            for j, (_, harmonic) in enumerate(self.harmonics):
                for ir_out in ir * harmonic:
                    if ir_out in self.gate.irreps_in:
                        instructions.append((i, j, len(found), "uvu", True))
                        found += o3.Irreps([(mul, ir_out)])
        self.self_connection = o3.Linear(irreps_in, self.gate.irreps_in)
        self.before = o3.Linear(irreps_in, irreps_in)
        self.product = o3.TensorProduct(
            irreps_in, self.harmonics, found, instructions, internal_weights=False, shared_weights=False
        )
        self.weights = FullyConnectedNet([bumps, 32, self.product.weight_numel], torch.nn.functional.silu)
        self.after = o3.Linear(found, self.gate.irreps_in)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, shift: Tensor | None = None) -> Tensor:
        """Features of the points, along edges (2, E) from sources that are ``shift`` (E, 3) away from their places, as
        the images of a crystal's atoms are."""
        source, target = edge_index
        edge = pos[source] - pos[target] if shift is None else pos[source] + shift - pos[target]
        length = (edge.square().sum(1) + SOFT**2).sqrt()
        radial = soft_one_hot_linspace(length, 0.0, self.radius, self.bumps, "gaussian", cutoff=False)
        harmonics = o3.spherical_harmonics(
            self.harmonics, edge / length[:, None], normalize=False, normalization="component"
        )
        weights = self.weights(radial * self.bumps**0.5)
        if self.cutoff:
            weights = weights * soft_unit_step(5 * (1 - length / math.hypot(self.radius, SOFT)))[:, None]
        messages = self.product(self.before(x)[source], harmonics, weights)
        total = messages.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages)
        return self.gate(self.self_connection(x) + self.after(total / self.neighbors**0.5))
