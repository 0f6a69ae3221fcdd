"""Shapes in boxes of voxels, and the study of who tells them apart, upright and turned."""

import dataclasses

import numpy as np
import pytest
import torch

from tg_equiattn.groups import octahedral
from tg_equiattn.testing import act, equivariance_error


def test_turning_a_shape_permutes_its_voxels():
    """For every symmetry of the cube, mirrors included; any other rotation does not, but keeps the volume."""
    from data.solids import shapes, volumes
    from scipy.spatial.transform import Rotation

    cube, (solids, _) = octahedral(reflections=True), shapes(8, 3)
    boxes = volumes(solids, 8)
    for element, matrix in enumerate(cube.matrices.numpy()):
        there = volumes(solids, 8, np.broadcast_to(matrix, (8, 3, 3)))
        assert (there - act(boxes, cube, element)).abs().max() < 1e-6
    fine, turned = (volumes(solids, 24, turn) for turn in (None, Rotation.random(8, random_state=0).as_matrix()))
    assert (turned - fine).abs().amax((1, 2, 3, 4)).min() > 0.5
    assert (turned.sum((2, 3, 4)) / fine.sum((2, 3, 4)) - 1).abs().max() < 0.03


@pytest.mark.parametrize("name", ["GE-ViT", "GE-ViT, frames", "GE-ViT, no rotations", "G-CNN", "G-CNN, no rotations"])
def test_what_models_are_invariant_under(study, name):
    """Rotations, but not reflections; without rotations neither."""
    model = study.build(dataclasses.replace(study.PRESETS["quick"], models=(name,)), width=4)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.uniform_(module.bias, -0.5, 0.5)
    model.eval()
    boxes = torch.rand(2, 1, 8, 8, 8)
    worst = study.errors(model, boxes)
    assert (worst["rotations"] < 1e-5) == ("no rotations" not in name)
    assert worst["reflections"] > 1e-3
    if "no rotations" in name:
        assert worst["rotations"] > 1e-3
    assert worst["rotations"] == equivariance_error(model, octahedral(), boxes)
