"""The escnn examples run end to end, and what their tables say is what their rows hold."""

import dataclasses

import pytest
import torch


def test_the_convolutional_network(study):
    """As many parameters as the attention network, equivariant, and its checkpoints load in either mode."""
    settings = study.RotatedDigits(models=("C8 G-CNN",), relation=("ge_vit",), channels=12)
    model = study.build(settings)
    wanted = sum(p.numel() for p in study.build(dataclasses.replace(settings, models=("R8_SA",))).parameters())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(wanted, rel=0.2)
    images = torch.rand(3, 1, 16, 16)
    model.train()(images)
    model.eval()
    errors = study.equivariance(model, images)
    assert errors["max error"] < 1e-5
    assert 0 < errors["mean error"] < errors["max error"]
    other = study.build(settings).eval()
    assert not torch.allclose(other(images), model(images))
    state = model.state_dict()
    assert not any(name.endswith(".filter") for name in state)
    other.load_state_dict(state)
    torch.testing.assert_close(other.eval()(images), model(images))
    study.build(settings).train().load_state_dict(state)
