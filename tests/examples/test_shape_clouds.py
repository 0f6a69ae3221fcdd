"""Surfaces that clouds are drawn from."""

import numpy as np
import pytest
from data import surfaces


@pytest.mark.parametrize("name", ["ellipsoid", "box", "cylinder", "cone", "ring", "coil", "trefoil", "figure eight"])
def test_surfaces_are_closed(name):
    """Every side of a triangle with an area belongs to two of them, and volumes are positive: normals point one way."""
    for seed in range(4):
        vertices, triangles = surfaces.SHAPES[name](np.random.default_rng(seed))
        _, places = np.unique(vertices.round(9), axis=0, return_inverse=True)  # those on the axis are one
        triangles = places.reshape(-1)[triangles]
        triangles = triangles[(np.diff(np.sort(triangles), axis=1) > 0).all(1)]
        sides = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
        there, back = ({tuple(side) for side in part.tolist()} for part in (sides, sides[:, ::-1]))
        assert len(there) == len(sides)
        assert there == back
