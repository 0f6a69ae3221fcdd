"""Shapes in boxes of voxels, upright and turned."""

import numpy as np
from data.solids import shapes, volumes
from scipy.spatial.transform import Rotation

from tg_equiattn.groups import octahedral
from tg_equiattn.testing import act


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
