"""Forged micrographs, and the networks that find copied regions."""

import numpy as np
import pytest
import torch
from baselines.copy_detectors import GSPACE, Comparison, UNet
from data.forgeries import region

MIDDLES = {
    "deeper": {},
    "comparison": {"descriptors": 2},
    "attention": {"descriptors": 2, "heads": 1, "head_channels": 3},
}


@pytest.mark.parametrize("mirror", [1, -1])
def test_offsets_of_a_copy_are_those_of_its_source(mirror):
    """A copy by a quarter turn, mirrored or not, holds the source's pixels, read at the offsets of its region."""
    matrix = np.array([[0.0, mirror], [-1, 0]])
    radii, (here, there) = np.array([5, 0, 1j], complex), np.array([[10.0, 12], [25, 20]])
    _, source = region(40, here, np.eye(2), radii)
    offsets, copy = region(40, there, matrix, radii)
    rows, columns = np.rint(offsets + here[:, None, None]).astype(int).clip(0, 39)
    inside = copy > 0.01
    np.testing.assert_allclose(source[rows, columns][inside], copy[inside], atol=1e-6)


@pytest.mark.parametrize("middle", MIDDLES)
def test_networks_of_groups_are_equivariant(randomise, middle):
    x = torch.randn(2, 1, 32, 32)
    for grouped in (True, False)[: 1 + (middle != "attention")]:
        model = randomise(UNet(grouped, 2, middle, **MIDDLES[middle])).eval()
        out = model(x)
        for moved in (lambda y: y.rot90(1, (2, 3)), lambda y: y.flip(3)):
            change = (model(moved(x)) - moved(out)).abs().max() / out.abs().max()
            assert change < 1e-5 if grouped else change > 1e-3


def test_descriptors_of_rotated_and_mirrored_copies_are_equal():
    """Only with groups: a pattern, and a copy of it at another place."""
    x = torch.zeros(1, 1, 32, 32)
    pattern = torch.randn(8, 8)
    x[0, 0, 4:12, 4:12], x[0, 0, 20:28, 20:28] = pattern, pattern.rot90().flip(0)
    for grouped in (True, False):
        torch.manual_seed(0)
        middle = Comparison(grouped, 1, 8).eval()
        regular = x.repeat_interleave(len(GSPACE.fibergroup.elements), 1) if grouped else x
        with torch.no_grad():
            cosine = middle(regular)[0, 0, 3:5, 3:5]  # pixels whose descriptors see the pattern alone
        assert (cosine > 1 - 1e-5).all() if grouped else (cosine < 1 - 1e-5).any()
