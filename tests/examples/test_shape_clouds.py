"""Clouds on surfaces: uniform by area, closed, upright and scaled; neighbors; and the study of telling them apart."""

import dataclasses
import math

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def surfaces():
    from data import surfaces

    return surfaces


def test_clouds_are_normalised_balanced_and_repeatable(surfaces):
    positions, labels = surfaces.clouds(19, 64, 0.0, seed=3)
    assert positions.dtype == torch.float64
    assert sorted(labels.bincount().tolist()) == [2] * 5 + [3] * 3
    assert positions.mean(1).abs().max() < 1e-12
    torch.testing.assert_close(positions.square().sum(-1).mean(1), torch.ones(19, dtype=torch.float64))
    again, other = (surfaces.clouds(19, 64, 0.0, seed)[0] for seed in (3, 4))
    assert torch.equal(positions, again)
    assert not torch.equal(positions, other)
    noisy, _ = surfaces.clouds(8, 4000, 0.1, seed=5)
    assert (noisy.square().sum(-1).mean(1) - 1 - 3 * 0.1**2).abs().max() < 0.02


def test_points_are_uniform_by_area(surfaces):
    """On a box, shares of the faces are those of their areas; within each, means lie in the middle."""
    draw = np.random.default_rng(0)
    vertices, triangles = surfaces.box(draw)
    points = surfaces.sample(vertices, triangles, 20000, draw)
    half = np.abs(vertices[vertices[:, :2].any(1)]).max(0)
    faces = np.abs(np.abs(points) - half) < 1e-9
    assert (faces.sum(1) == 1).all()
    areas = np.prod(half) / half
    np.testing.assert_allclose(faces.mean(0), areas / areas.sum(), atol=0.015)
    top = points[faces[:, 2] & (points[:, 2] > 0)]
    np.testing.assert_allclose(top[:, :2].mean(0), 0, atol=0.04)
    np.testing.assert_allclose(top[:, :2].std(0), half[:2] / math.sqrt(3), rtol=0.05)


@pytest.mark.parametrize("name", ["ellipsoid", "box", "cylinder", "cone", "ring", "coil", "trefoil", "figure eight"])
def test_surfaces_are_closed(surfaces, name):
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


def test_farthest_first_and_nearest():
    from shape_clouds import farthest_first, nearest

    line = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], dtype=torch.float64)[None]
    ordered = farthest_first(line, 3)
    assert ordered[0, :, 0].tolist() == [4, 0, 2, 1]
    assert nearest(ordered, 2, 2).sort(-1).values.tolist() == [[[0, 2], [1, 3]]]


@pytest.mark.parametrize("name", ["distance", "mlp", "PointNet++", "DGCNN"])
def test_what_turning_and_shifting_change(name):
    """Distances: neither changes the outputs. Offsets: shifting does not."""
    from shape_clouds import PRESETS, build, measured, predict, tested

    settings = dataclasses.replace(PRESETS["quick"], models=(name,))
    tests = tested(settings)
    assert torch.equal(tests["upright"][-1], tests["turned"][-1])
    model = build(settings)
    predict(model.train(), tests["upright"])  # which measures how long edges are
    result = measured(model, tests, settings)
    for change, exact in (("change", 1e-5), ("change in float64", 1e-12)):
        turned, shifted = (result[change][test] for test in ("turned", "shifted"))
        assert turned < exact if name == "distance" else turned > 1e-4
        assert shifted < exact if name in ("distance", "mlp") else shifted > 1e-4
