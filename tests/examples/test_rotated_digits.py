"""The escnn examples run end to end, and what their tables say is what their rows hold."""

import dataclasses

import pytest
import torch


@pytest.fixture(scope="module")
def digits():
    import rotated_digits

    return rotated_digits


def test_the_convolutional_network(digits):
    """As many parameters as the attention network, equivariant, and its checkpoints load in either mode."""
    settings = digits.RotatedDigits(models=("C8 G-CNN",), relation=("ge_vit",), channels=12)
    model = digits.build(settings)
    wanted = sum(p.numel() for p in digits.build(dataclasses.replace(settings, models=("R8_SA",))).parameters())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(wanted, rel=0.2)
    images = torch.rand(3, 1, 16, 16)
    model.train()(images)
    model.eval()
    errors = digits.equivariance(model, images)
    assert errors["max error"] < 1e-5
    assert 0 < errors["mean error"] < errors["max error"]
    other = digits.build(settings).eval()
    assert not torch.allclose(other(images), model(images))
    state = model.state_dict()
    assert not any(name.endswith(".filter") for name in state)
    other.load_state_dict(state)
    torch.testing.assert_close(other.eval()(images), model(images))
    digits.build(settings).train().load_state_dict(state)


def test_the_broken_relation_shows(digits):
    errors = {}
    for relation in ("ge_vit", "gsa"):
        model = digits.build(digits.RotatedDigits(models=("R4_SA",), relation=(relation,))).eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.7)
        errors[relation] = digits.equivariance(model, torch.rand(2, 1, 16, 16))["max error"]
    assert errors["ge_vit"] < 1e-5
    assert errors["gsa"] > 1e-3
