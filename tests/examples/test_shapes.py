"""Surfaces that clouds are drawn from, and shapes in boxes of voxels, upright and turned."""

import numpy as np
import pytest
from data import surfaces
from data.solids import shapes, volumes
from scipy.spatial.transform import Rotation

from tg_equiattn.groups import octahedral
from tg_equiattn.testing import act


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


def test_turning_a_shape_permutes_its_voxels():
    """For every symmetry of the cube, mirrors included; any other rotation does not, but keeps the volume."""
    cube, (solids, _) = octahedral(reflections=True), shapes(8, 3)
    boxes = volumes(solids, 8)
    for element, matrix in enumerate(cube.matrices.numpy()):
        there = volumes(solids, 8, np.broadcast_to(matrix, (8, 3, 3)))
        assert (there - act(boxes, cube, element)).abs().max() < 1e-6
    fine, turned = (volumes(solids, 24, turn) for turn in (None, Rotation.random(8, random_state=0).as_matrix()))
    assert (turned - fine).abs().amax((1, 2, 3, 4)).min() > 0.5
    assert (turned.sum((2, 3, 4)) / fine.sum((2, 3, 4)) - 1).abs().max() < 0.03
