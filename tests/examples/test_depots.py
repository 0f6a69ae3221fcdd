"""Graphs whose nodes look for their depot."""

import pytest
import torch
from data.depots import depots, nearest_of_three


@pytest.mark.parametrize("nodes", [13, 52])
def test_every_colour_has_one_depot(nodes):
    """Places fill a square of one node a unit of area; targets lead to the flagged node of the same colour."""
    drawn = depots(7, nodes, 5, 3, seed=1)
    for pos, colours, flagged, neighbors, targets in zip(*drawn, strict=True):
        assert pos.min() >= 0
        assert 0.8 * nodes**0.5 < pos.max() <= nodes**0.5
        assert sorted(colours[flagged].tolist()) == [0, 1, 2, 3, 4]
        for n in range(nodes):
            depot = (colours == colours[n]) & flagged
            torch.testing.assert_close(pos[n] + targets[n], pos[depot][0])
            distances = (pos - pos[n]).norm(dim=1)
            assert sorted(neighbors[n].tolist()) == sorted(distances.argsort()[1:4].tolist())


def test_beacons_are_seen_in_their_quadrant():
    """Of the nearest of three, from each node; beacons themselves are not asked."""
    drawn = nearest_of_three(5, 23, 3, seed=1)
    for pos, flagged, _, quadrants in zip(*drawn, strict=True):
        assert flagged.tolist() == [True] * 3 + [False] * 20
        assert quadrants[:3].tolist() == [-100] * 3
        for n in range(3, 23):
            x, y = min((b - pos[n] for b in pos[:3]), key=lambda offset: float(offset.norm())).tolist()
            assert int(quadrants[n]) == 2 * (x > 0) + (y > 0)
