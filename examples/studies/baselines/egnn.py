"""EGNN, the baseline of the n-body task, at its published size: all particles of a system are neighbors.

Source: V. G. Satorras, E. Hoogeboom, M. Welling, E(n) Equivariant Graph Neural Networks (2021), Eq. 3, 4, 6 and 7.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def _mlp(*widths: int, last: bool = False) -> nn.Sequential:
    """Linear maps with SiLU between, and at the end with ``last``."""
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*(layers if last else layers[:-1]))


class EGNNLayer(nn.Module):
    r"""One layer on all pairs of particles.

    .. math::
        m_{ij} &= \phi_e(h_i, h_j, |x_i - x_j|^2, a_{ij}) \\
        x_i &\leftarrow x_i + \phi_v(h_i) v_i + \tfrac{1}{n - 1} \sum_{j \ne i} (x_i - x_j) \phi_x(m_{ij}) \\
        h_i &\leftarrow h_i + \phi_h(h_i, \textstyle\sum_{j \ne i} m_{ij})
    """

    def __init__(self, channels: int, edge_channels: int) -> None:
        super().__init__()
        self.edge = _mlp(2 * channels + 1 + edge_channels, channels, channels, last=True)
        self.node = _mlp(2 * channels, channels, channels)
        self.position = _mlp(channels, channels, 1)
        self.position[-1] = nn.Linear(channels, 1, bias=False)
        self.velocity = _mlp(channels, channels, 1)
        nn.init.xavier_uniform_(self.position[-1].weight, gain=0.001)

    def forward(self, h: Tensor, x: Tensor, v: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        particles = x.shape[1]
        difference = x[:, :, None] - x[:, None]
        pairs = [h[:, :, None].expand(-1, -1, particles, -1), h[:, None].expand(-1, particles, -1, -1)]
        messages = self.edge(torch.cat([*pairs, difference.square().sum(-1, keepdim=True), edges], -1))
        messages = messages * ~torch.eye(particles, dtype=torch.bool, device=x.device)[:, :, None]
        forces = (difference * self.position(messages)).sum(2) / max(1, particles - 1)
        return h + self.node(torch.cat([h, messages.sum(2)], -1)), x + self.velocity(h) * v + forces


class EGNN(nn.Module):
    """Four layers of width 64; nodes start from the speed, edges know the product of charges and the distance squared.

    Shapes:
        charges (B, n), velocities and positions (B, n, 3) -> later positions (B, n, 3).
    """

    def __init__(self, channels: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(1, channels)
        self.layers = nn.ModuleList(EGNNLayer(channels, 2) for _ in range(num_layers))

    def forward(self, charges: Tensor, velocities: Tensor, positions: Tensor) -> Tensor:
        h, x = self.embed(velocities.norm(dim=-1, keepdim=True)), positions
        distances = (x[:, :, None] - x[:, None]).square().sum(-1)
        edges = torch.stack([charges[:, :, None] * charges[:, None], distances], -1)
        for layer in self.layers:
            h, x = layer(h, x, velocities, edges)
        return x
