"""Canvases with a pair of equal patterns, and the study of which networks find it."""

import dataclasses

import pytest
import torch


def patterns(canvases, side):
    """The patterns of a canvas's cells, (N, cells, 4, 4), and of all its cells."""
    all_ = canvases.images.unflatten(2, (side, 4)).unflatten(4, (side, 4)).transpose(3, 4)[:, 0].flatten(1, 2)
    return all_[torch.arange(len(all_))[:, None], canvases.places], all_


@pytest.mark.parametrize(
    "name",
    [
        "frames", "frames, no content", "relative", "ge_vit", "G-CNN + mean", "deep G-CNN", "dilated G-CNN",
        "wide G-CNN", "deep G-CNN + mean",
    ],
)  # fmt: skip
def test_scores_turn_with_the_canvas(study, name):
    """And every cell's score depends on every pattern: no model lacks the sight of what it has to compare."""
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
    images = canvases.images.clone().requires_grad_()
    for cell in range(9):
        (gradient,) = torch.autograd.grad(model(images)[:, cell].sum(), images)
        seen, _ = patterns(canvases._replace(images=gradient), 3)
        assert (seen.abs().amax((0, 2, 3)) > 1e-8).all()
