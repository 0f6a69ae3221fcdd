"""The escnn examples run end to end, and what their tables say is what their rows hold."""

import dataclasses

import pytest
import torch
from image_writers import AMAT, write_rotmnist
from running import rows_of, run_here

TINY = {"channels": 4, "heads": 1, "head_channels": 2, "blocks": 1, "size": 8}


@pytest.fixture(scope="module")
def digits():
    import rotated_digits

    return rotated_digits


def test_published_files_choose_the_epoch(tmp_path):
    write_rotmnist(tmp_path, train=24, test=5)
    flags = [x for name, value in TINY.items() for x in (f"--{name.replace('_', '-')}", value)]
    result = run_here("studies/rotated_digits.py", *flags, "--data", tmp_path, "--models", "R4_SA", "C4 G-CNN",
                      "--relation", "relative", "--epochs", 2, "--no-progress", "--output", tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path, "rotated_digits")
    assert [row.setting("models") for row in rows] == ["R4_SA", "C4 G-CNN"]
    for one in rows:
        assert [epoch for epoch, _ in one.more["curve"]] == [1, 2]
        assert one.more["max error"] < 1e-5
    assert (tmp_path / "rotated_digits" / "errors.png").stat().st_size > 5000
    (tmp_path / AMAT["test"]).unlink()
    again = run_here("studies/rotated_digits.py", "--data", tmp_path, "--output", tmp_path)
    assert again.returncode != 0
    assert str(tmp_path / AMAT["test"]) in again.stderr.strip().splitlines()[-1]
    assert "Traceback" not in again.stderr


def test_a_quarter_turn_of_the_data_is_exact():
    from data.rotated_digits import rotate

    images = torch.rand(2, 1, 7, 7)
    turned = rotate(images, torch.tensor([torch.pi / 2, 0.0]), 7, 1.0)
    torch.testing.assert_close(turned, torch.stack([images[0].rot90(1, (-2, -1)), images[1]]), rtol=0, atol=1e-5)


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
