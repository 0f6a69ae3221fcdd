"""Digits at other scales, and the study of which networks know them again."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tg_equiattn.groups import dyadic
from tg_equiattn.testing import TOLERANCE, dilation_errors


@pytest.fixture(scope="module")
def study():
    import scaled_digits

    return scaled_digits


@pytest.fixture(scope="module")
def data():
    import data.scaled_digits

    return data.scaled_digits


@pytest.fixture(scope="module")
def images(data):
    return data.scaled_digits(1200, 400, 1)[2][0]


def settings_of(study, name, **changes):
    return dataclasses.replace(study.PRESETS["quick"], models=(name,), **changes)


def test_zooms_keep_digits(data, images):
    """Seen from further away nearly every enlarged digit is the nearest to what it was, at its place and as bright."""
    assert data.zoomed(images, 1) is images
    for factor in (0.7, 1.5, 2, 3, 4):
        there = data.zoomed(images, factor)
        side = round(10 * factor)
        assert there.shape[2:] == (side, side)
        assert (there.mean((1, 2, 3)) - images.mean((1, 2, 3))).abs().max() < 0.02
        if factor < 1:  # where pixels are lost
            continue
        back = F.interpolate(there, (10, 10), mode="bilinear", antialias=True)
        nearest = torch.cdist(back.flatten(1), images.flatten(1)).argmin(1)
        assert (nearest == torch.arange(len(images))).double().mean() > 0.9


@pytest.mark.parametrize("name", ["scales", "scales, mixed", "no scales", "convolution", "convolution, scales"])
def test_features_of_doubled_pixels(study, images, name, randomise):
    """Up one scale, with scales that do not mix; those of networks without scales do not stay."""
    model = randomise(study.build(settings_of(study, name)).double(), 0.3).eval()
    (error,) = study.errors(model, images[:2].double())
    if name in ("scales", "convolution, scales"):
        assert error <= TOLERANCE[torch.float64]
        assert error == max(dilation_errors(model.features, dyadic(2), images[:2].double()))
    else:
        assert error > 1e-6
