"""Nodes at random places that look for the one flagged node of their colour: what is far away decides, and where."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BEACONS = 3


class Depots(NamedTuple):
    """Graphs of equal size, B of N nodes with K edges each.

    Attributes:
        positions: ``(B, N, 2)``, float64, in a square of one node a unit of area.
        colours: ``(B, N)``, a number each.
        flagged: ``(B, N)``, true for one node of each colour.
        neighbors: ``(B, N, K)``, each node's nearest others.
        displacements: ``(B, N, 2)``, float64, from each node to the flagged node of its colour.
    """

    positions: Tensor
    colours: Tensor
    flagged: Tensor
    neighbors: Tensor
    displacements: Tensor


def depots(count: int, nodes: int, colours: int, k: int, seed: int) -> Depots:
    """So many graphs, the same ones every time.

    Raises:
        ValueError: where there are fewer nodes than colours, or than neighbors and one.
    """
    if nodes < max(colours, k + 1):
        raise ValueError(f"nodes must be at least as many as colours {colours} and more than k {k}, got {nodes}")
    generator = torch.Generator().manual_seed(seed)
    positions = math.sqrt(nodes) * torch.rand(count, nodes, 2, generator=generator, dtype=torch.float64)
    colour = torch.randint(colours, (count, nodes), generator=generator)
    colour[:, :colours] = torch.arange(colours)  # places are random, so that these are flagged
    flagged = (torch.arange(nodes) < colours).expand(count, -1)
    depot = positions.gather(1, colour[..., None].expand(-1, -1, 2))
    return Depots(positions, colour, flagged, nearest(positions, k), depot - positions)


def nearest(positions: Tensor, k: int) -> Tensor:
    """Each node's nearest others, ``(B, N, k)``, of positions ``(B, N, 2)``."""
    found = []
    for part in positions:  # one after the other: all distances at once are large
        found.append(torch.cdist(part, part).fill_diagonal_(math.inf).topk(k, largest=False).indices)
    return torch.stack(found)


def nearest_of_three(count: int, nodes: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Graphs with three flagged nodes, the same ones every time: positions, flags, neighbors, and the quadrant in which
    a node's nearest flagged node lies, 0 to 3; of flagged nodes, -100.

    Raises:
        ValueError: where there are no more nodes than flagged ones, or neighbors.
    """
    if nodes <= max(BEACONS, k):
        raise ValueError(f"nodes must be more than {BEACONS} beacons and k {k}, got {nodes}")
    generator = torch.Generator().manual_seed(seed)
    positions = math.sqrt(nodes) * torch.rand(count, nodes, 2, generator=generator, dtype=torch.float64)
    flagged = (torch.arange(nodes) < BEACONS).expand(count, -1)  # places are random
    offsets = positions[:, None, :BEACONS] - positions[:, :, None]
    place = offsets.square().sum(-1).argmin(-1)
    x, y = offsets.gather(2, place[..., None, None].expand(-1, -1, 1, 2))[:, :, 0].unbind(-1)
    quadrants = (2 * (x > 0) + (y > 0)).masked_fill(flagged, -100)
    return positions, flagged, nearest(positions, k), quadrants
