"""Shapes in boxes of voxels, and the study of who tells them apart, upright and turned."""

import dataclasses

import numpy as np
import pytest
import torch

from tg_equiattn.groups import octahedral
from tg_equiattn.testing import act, equivariance_error


@pytest.fixture(scope="module")
def study():
    import solid_shapes

    return solid_shapes


def writhe(curve):
    """Of a closed curve: the sum over pairs of pieces, positive where it is right-handed."""
    middles, pieces = (curve[1:] + curve[:-1]) / 2, np.diff(curve, axis=0)
    apart = middles[:, None] - middles[None]
    triple = np.einsum("ijk,ijk->ij", apart, np.cross(pieces[:, None], pieces[None]))
    distance = np.linalg.norm(apart, axis=-1) + np.eye(len(pieces))
    return (triple / distance**3).sum() / (4 * np.pi)


def test_right_is_right():
    """The knot's writhe is that of three crossings of one sign, and the coil advances as it turns to the left."""
    from data.solids import helix, trefoil

    knot, mirror = trefoil(0.24, 0.3), trefoil(0.24, 0.3) * [-1, 1, 1]
    assert writhe(knot) == pytest.approx(-writhe(mirror))
    assert 3 < writhe(knot) < 4
    steps = np.diff(helix(0.4, 0.6, 1.5, 0.3), axis=0)
    assert (np.linalg.det(np.stack([steps[:-2], steps[1:-1], steps[2:]], 1)) > 0).all()


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


@pytest.mark.parametrize("kind", ["knot", "coil"])
def test_left_is_the_mirror_image_of_right(kind):
    """With the same draws; and neither is, turned, the other."""
    from data.solids import SHAPES, volumes

    right, left = (SHAPES[f"{hand} {kind}"](np.random.default_rng(5)) for hand in ("right", "left"))
    mirror = np.diag([-1.0, 1, 1])[None]
    there = volumes([left], 16)
    assert (volumes([right], 16, mirror) - there).abs().max() < 1e-6
    for turn in octahedral().matrices.numpy():
        assert (volumes([right], 16, turn[None]) - there).abs().max() > 0.5


def test_classes_are_balanced_and_drawn_from_a_seed():
    from data.solids import KINDS, shapes, volumes

    solids, labels = shapes(24, 1)
    assert labels.bincount().tolist() == len(KINDS) * [3]
    boxes = volumes(solids, 16)
    assert boxes.shape == (24, 1, 16, 16, 16)
    assert boxes.min() >= 0
    assert 0.9 < boxes.amax((1, 2, 3, 4)).min() <= 1
    edges = torch.ones(16, 16, 16, dtype=torch.bool)
    edges[1:-1, 1:-1, 1:-1] = False
    assert boxes[:, 0, edges].mean() < 0.01  # whole shapes are in the box
    again, same = shapes(24, 1)
    assert torch.equal(labels, same)
    assert torch.equal(boxes, volumes(again, 16))
    other, _ = shapes(24, 2)
    assert not torch.equal(boxes, volumes(other, 16))
    flat = boxes.flatten(1)
    assert torch.cdist(flat, flat).add(100 * torch.eye(24)).min() > 0.5  # no two are the same


@pytest.mark.parametrize("name", ["GE-ViT", "GE-ViT, frames", "GE-ViT, no rotations", "G-CNN", "G-CNN, no rotations"])
def test_what_models_are_invariant_under(study, name):
    """Rotations, but not reflections; without rotations neither."""
    torch.manual_seed(0)
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
