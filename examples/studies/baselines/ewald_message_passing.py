"""Ewald message passing (Kosmala et al., arXiv 2303.04791) of open clouds, written from the paper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SCALE = 0.05  # at the start the variance is about 1, of 48 points in a cube of 8 a side


class Residual(nn.Module):
    """(x + two layers of x) / sqrt(2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(channels, channels, bias=False), nn.SiLU(), nn.Linear(channels, channels, bias=False), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layers(x)) / math.sqrt(2)


class EwaldMessagePassing(nn.Module):
    r"""Messages of invariant features through waves, with a learned filter of the wavenumber.

    .. math:: s_k = \sum_j d_j h_j e^{-i k x_j}, \qquad m_i = d_i \sum_k f(|k|) \odot s_k e^{i k x_i}

    The waves are a grid of voxels of side ``spacing`` with :math:`|k|` up to ``max_wavenumber``, the filter a linear
    map, through a bottleneck, of Gaussians of :math:`|k|`, and d the sinc functions of a voxel. A residual layer comes
    before and a dense layer after it. The paper turns every cloud into the frame of its singular vectors, which has no
    derivative where two singular values meet; here clouds stay as they are, so that energies have forces, and the
    result is not invariant to rotations.

    Args:
        channels: of the features.
        max_wavenumber, spacing: of the waves.
        bumps: Gaussians of the wavenumber.
        bottleneck: channels of the filter inside.
    """

    waves: Tensor
    basis: Tensor

    def __init__(
        self, channels: int, max_wavenumber: float = 1.5, spacing: float = 0.2, bumps: int = 48, bottleneck: int = 8
    ) -> None:
        super().__init__()
        reach = int(max_wavenumber / spacing)
        numbers = torch.cartesian_prod(*[torch.arange(-reach, reach + 1.0)] * 3)
        waves = spacing * numbers[len(numbers) // 2 :]  # k and -k give one term
        waves = waves[waves.norm(dim=1) <= max_wavenumber]
        centres = torch.linspace(0, max_wavenumber, bumps)
        basis = (-((waves.norm(dim=1)[:, None] - centres) / (centres[1] - centres[0])).square() / 2).exp()
        self.spacing = spacing
        self.register_buffer("waves", waves, persistent=False)
        self.register_buffer("basis", basis, persistent=False)
        self.before = Residual(channels)
        self.down = nn.Linear(bumps, bottleneck, bias=False)
        self.up = nn.Linear(bottleneck, channels, bias=False)
        self.after = nn.Sequential(nn.Linear(channels, channels, bias=False), nn.SiLU())

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        """Features (B, N, C) at positions (B, N, 3)."""
        pos = pos - pos.mean(1, keepdim=True)
        # of y = spacing x / 2 sin(y) / y, torch's being sin(pi x) / (pi x)
        damping = torch.sinc(self.spacing * pos / (2 * math.pi)).prod(2, keepdim=True)
        phases = pos @ self.waves.T
        cosine, sine = damping * phases.cos(), damping * phases.sin()
        filters = self.up(self.down(self.basis))
        given = self.before(x)
        even, odd = (filters * (part.mT @ given) for part in (cosine, sine))
        return self.after(SCALE * (cosine @ even + sine @ odd))
