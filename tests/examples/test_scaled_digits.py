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


def test_parts_hold_digits_with_a_margin(data):
    """Whole digits, none of them twice."""
    parts = data.scaled_digits(1200, 400, 2)
    assert [(tuple(images.shape), len(labels)) for images, labels in parts] == [
        ((count, 1, 12, 12), count) for count in (1200, 197, 400)
    ]
    every = torch.cat([images for images, _ in parts])
    inside = F.pad(every[..., 2:-2, 2:-2], 4 * (2,))
    assert torch.equal(every, inside)
    assert len(every.unique(dim=0)) == len(every)
    assert all(len(labels.unique()) == 10 for _, labels in parts)


def test_pixels_are_repeated(data, images):
    there = data.repeated(images, 3)
    assert there.shape[2:] == (30, 30)
    for row, column in ((0, 0), (1, 2), (2, 2)):
        assert torch.equal(there[..., row::3, column::3], images)


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


@pytest.mark.parametrize("name", ["scales", "scales, mixed", "no scales", "convolution", "convolution, scales"])
def test_logits_are_the_greatest_of_all_scales(study, images, name, randomise):
    model = randomise(study.build(settings_of(study, name)), 0.3).eval()
    scores = study.by_scale(model, images[:5], size=3)
    assert scores.shape == (5, 10, 2 if study.has_scales(name) else 1)
    torch.testing.assert_close(scores.amax(2), model(images[:5]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["scales", "convolution, scales"])
def test_scales_added_after_training(study, images, name, randomise):
    """They change no other, and with them doubled pixels have all that single ones have."""
    settings = settings_of(study, name)
    model = randomise(study.build(settings), 0.3).eval()
    larger = study.build(settings, more=2).eval()
    larger.load_state_dict(model.state_dict())
    scores = study.by_scale(larger, images[:4])
    torch.testing.assert_close(scores[..., :2], study.by_scale(model, images[:4]), rtol=0, atol=1e-6)
    doubled = study.by_scale(larger, study.repeated(images[:4], 2))
    torch.testing.assert_close(doubled[..., 1:], scores[..., :-1], rtol=0, atol=1e-5)


def test_one_scale_is_a_plain_network(study, images, randomise):
    """The convolutions and norms of torch, in a row."""
    model = randomise(study.build(settings_of(study, "convolution")), 0.3).eval()
    x = images[:3]
    for layer, norm in zip(model.convolutions, model.norms, strict=True):
        x = F.conv2d(x, layer.weight, padding=1)
        x = F.silu(F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps))
    expected = F.linear(x.mean((2, 3)), model.classifier.weight[..., 0], model.classifier.bias)
    torch.testing.assert_close(model(images[:3]), expected, rtol=0, atol=1e-5)


def test_what_is_measured(study, images):
    """Of a model whose first scale decides for single pixels, and the second for repeated ones."""

    class Known(torch.nn.Module):
        def features(self, x):
            """Class 0 by the first scale for images that are not repeated; class 1 by the second for others."""
            classes = torch.zeros(len(x), 10, 2, 1, 1)
            single = x.shape[-1] == images.shape[-1]
            classes[:, 0, 0] = 1.0 if single else 0.0
            classes[:, 1, 1] = 0.5
            return classes

        classifier = torch.nn.Identity()

    labels = torch.tensor([0, 0, 0, 1])
    found = study.on_repeated(Known(), images[:4], labels)
    assert found == {
        "repeated": {"1": 75, "2": 25, "4": 25},
        "same": {"1": 100, "2": 0, "4": 0},
        "decided": {"1": [100, 0], "2": [0, 100], "4": [0, 100]},
    }
    assert study.accuracy_of(Known(), images[:4], labels) == 75


def test_the_rate_is_chosen_by_validation(study):
    """By the seeds that all rates have, and of equal ones the lowest."""
    from harness.results import Row

    def row(rate, seed, validation):
        settings = {"models": ["scales"], "learning_rate": rate, "seeds": [seed]}
        return Row("scaled_digits", "accuracy", 0.0, 1, 1.0, "", "", "", settings, {"validation": validation})

    rows = [row(0.02, 0, 90.0), row(0.01, 0, 95.0), row(0.01, 1, 10.0), row(0.04, 0, 95.0)]
    assert study.rates_of(rows) == {0.01: 95.0, 0.02: 90.0, 0.04: 95.0}
    assert study.chosen_rate(rows) == rows[1:3]
