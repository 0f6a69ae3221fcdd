"""Nodes at random places that look for the nearest of three beacons: where all three are decides which one it is."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BEACONS = 3


class Beacons(NamedTuple):
    """Graphs of equal size, B of N nodes with K edges each.

    Attributes:
        positions: ``(B, N, 2)``, float64, in a square of one node a unit of area.
        flagged: ``(B, N)``, true for the three beacons.
        neighbors: ``(B, N, K)``, each node's nearest others.
        quadrants: ``(B, N)``, the quadrant in which a node's nearest beacon lies, 0 to 3; of beacons, -100.
    """

    positions: Tensor
    flagged: Tensor
    neighbors: Tensor
    quadrants: Tensor


def beacons(count: int, nodes: int, k: int, seed: int) -> Beacons:
    """So many graphs, the same ones every time.

    Raises:
        ValueError: where there are no more nodes than beacons, or neighbors.
    """
    if nodes <= max(BEACONS, k):
        raise ValueError(f"nodes must be more than {BEACONS} beacons and k {k}, got {nodes}")
    generator = torch.Generator().manual_seed(seed)
    positions = math.sqrt(nodes) * torch.rand(count, nodes, 2, generator=generator, dtype=torch.float64)
    flagged = (torch.arange(nodes) < BEACONS).expand(count, -1)  # places are random
    offsets = positions[:, None, :BEACONS] - positions[:, :, None]
    nearest = offsets.square().sum(-1).argmin(-1)
    x, y = offsets.gather(2, nearest[..., None, None].expand(-1, -1, 1, 2))[:, :, 0].unbind(-1)
    quadrants = (2 * (x > 0) + (y > 0)).masked_fill(flagged, -100)
    neighbors = [torch.cdist(p, p).fill_diagonal_(math.inf).topk(k, largest=False).indices for p in positions]
    return Beacons(positions, flagged, torch.stack(neighbors), quadrants)
