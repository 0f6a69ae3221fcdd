"""Clouds on surfaces: uniform by area, closed, upright and scaled; neighbors; and the study of telling them apart."""

import dataclasses

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def surfaces():
    from data import surfaces

    return surfaces


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
