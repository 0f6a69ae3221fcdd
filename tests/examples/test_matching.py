"""Canvases with a pair of equal patterns, and the study of which networks find it."""

import dataclasses

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "frames", "frames, no content", "relative", "ge_vit", "G-CNN + mean", "deep G-CNN", "dilated G-CNN",
        "wide G-CNN", "deep G-CNN + mean",
    ],
)  # fmt: skip
def test_scores_turn_with_the_canvas(study, name):
    """By quarter turns; a mirrored canvas is another one (negative control)."""
    settings = dataclasses.replace(study.PRESETS["quick"], models=(name,))
    model = study.build(settings).eval()
    canvases = study.draw(5, 6, 3, seed=3)
    scores = model(canvases.images)
    for quarters in (1, 2, 3):
        there = model(canvases.images.rot90(quarters, (2, 3)))
        turned = scores.unflatten(1, (3, 3)).rot90(quarters, (1, 2)).flatten(1)
        # norms of four channels enlarge rounding
        assert (there - turned).abs().max() < 1e-4 * scores.abs().max()
    assert (model(canvases.images.flip(3)) - scores.unflatten(1, (3, 3)).flip(2).flatten(1)).abs().max() > 1e-2
