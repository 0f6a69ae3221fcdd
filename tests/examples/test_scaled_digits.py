"""Digits at other scales, and the study of which networks know them again."""

import dataclasses

import pytest
import torch

from tg_equiattn.groups import dyadic
from tg_equiattn.testing import TOLERANCE, dilation_errors


@pytest.fixture(scope="module")
def data():
    import data.scaled_digits

    return data.scaled_digits


@pytest.fixture(scope="module")
def images(data):
    return data.scaled_digits(1200, 400, 1)[2][0]


def settings_of(study, name, **changes):
    return dataclasses.replace(study.PRESETS["quick"], models=(name,), **changes)


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
