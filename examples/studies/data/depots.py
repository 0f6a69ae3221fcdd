"""Nodes at random places that look for the one flagged node of their colour: what is far away decides, and where."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


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
    found = []
    for part in positions:  # one after the other: all distances at once are large
        distances = torch.cdist(part, part).fill_diagonal_(math.inf)
        found.append(distances.topk(k, largest=False).indices)
    depot = positions.gather(1, colour[..., None].expand(-1, -1, 2))
    return Depots(positions, colour, flagged, torch.stack(found), depot - positions)
