"""Pairs of digits far apart, and the study of which networks compare them."""

import dataclasses

import pytest
import torch
from data.far_digits import far_digits


@pytest.mark.parametrize("name", ["window attention", "global attention", "exact attention", "G-CNN", "G-CNN + mean"])
def test_who_sees_the_other_digit(study, name):
    """With windows and convolutions alone a digit's score does not depend on the other one."""
    model = study.build(dataclasses.replace(study.PRESETS["quick"], models=(name,))).eval()
    batch = study.Canvases(*(x[:6] for x in far_digits(40, 10, 30, 32, 14)[2]))
    batch = batch._replace(images=batch.images.clone().requires_grad_())
    logits, _ = study.predict(model, batch)
    (gradient,) = torch.autograd.grad(logits.unflatten(0, (-1, 2))[:, 0].sum(), batch.images)
    own, other = (gradient[:, 0] * batch.masks[:, digit] for digit in (0, 1))
    assert own.abs().max() > 1e-6
    assert bool(other.any()) == (name not in ("window attention", "G-CNN"))
