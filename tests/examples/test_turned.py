"""Digits and volumes turned by any angle."""

import numpy as np
import pytest
import torch
from data.turned import SIDE, adrenal, digits, turned
from harness.training import parameters
from vision_transformers import VisionTransformers, build, predict


@pytest.mark.parametrize("dim", [2, 3])
def test_rotations_are_random_and_about_the_middle(dim):
    """A ball stays, a half becomes another half, and no image is mirrored."""
    axes = torch.meshgrid(*[torch.linspace(-1, 1, 15)] * dim, indexing="ij")
    ball = torch.exp(-8 * sum(x**2 for x in axes))
    images = torch.stack([ball, ball * (axes[0] > 0)])[None].expand(4, -1, *[-1] * dim)
    out = turned(images, torch.Generator().manual_seed(0))
    torch.testing.assert_close(out[:, 0], images[:, 0], rtol=0, atol=0.1)
    assert (out[:, 1] - out[:1, 1]).abs().amax(tuple(range(1, dim + 1)))[1:].min() > 0.1
    coordinates = torch.stack(axes)
    moved = turned(coordinates[None], torch.Generator().manual_seed(1))[0]
    middle = (slice(None), *[slice(5, 10)] * dim)
    a, b = (x[middle].flatten(1) for x in (coordinates, moved))
    found = b @ a.T @ torch.linalg.inv(a @ a.T)
    torch.testing.assert_close(found @ found.T, torch.eye(dim), rtol=0, atol=1e-4)
    assert torch.linalg.det(found) == pytest.approx(1, abs=1e-4)


def test_parts_of_digits():
    training, validation, test = digits(None, 50)
    assert [len(x) for x, _ in (training, validation, test)] == [50, 90, 450]


def test_volumes_and_their_models(tmp_path):
    """Of both kinds, at equal parameters where the name says so."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name in ("train", "val", "test"):
        arrays[f"{name}_images"] = rng.integers(0, 255, (3, 64, 64, 64), np.uint8)
        arrays[f"{name}_labels"] = np.arange(3)[:, None] % 2
    np.savez(tmp_path / "volumes.npz", **arrays)
    training, validation, _ = adrenal(tmp_path / "volumes.npz", 2)
    assert training[0].shape == (2, 1, SIDE, SIDE, SIDE)
    assert validation[1].tolist() == [0, 1, 0]
    sizes = {}
    for name in ("frames cube", "plain, equal parameters", "plain, equal width", "CNN"):
        settings = VisionTransformers(models=(name,), data=tmp_path / "volumes.npz", layers=1)
        settings.check()
        model = build(settings, SIDE)
        assert predict(model, [*training])[0].shape == (2, 2)
        sizes[name] = parameters(model)
    assert sizes["plain, equal width"] > 4 * sizes["plain, equal parameters"]
