"""Products of features and harmonics: couplings of three degrees, of which two are scalars' and vectors'."""

import pytest
import torch
from space import motion

from tg_equiattn.encodings.harmonics import solid_harmonics
from tg_equiattn.nn.waves.spherical_features import gaunt_coupling

DEGREES = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 2, 1)]


def turns(rotation, degree):
    """The matrix by which harmonics of a degree turn: Y(R x) = D Y(x)."""
    x, part = torch.randn(40, 3, dtype=torch.float64), slice(degree**2, (degree + 1) ** 2)
    before, after = (solid_harmonics(y, degree)[:, part] for y in (x, x @ rotation.T))
    return torch.linalg.lstsq(before, after).solution.T


@pytest.mark.parametrize("degrees", DEGREES)
def test_the_invariant_product(degrees):
    """Of norm 1, and left alone by rotations, which leaves one but for its sign: e3nn's."""
    rotation, coupling = motion(), gaunt_coupling(*degrees)
    turned = torch.einsum("abc,ia,jb,kc->ijk", coupling, *(turns(rotation, degree) for degree in degrees))
    torch.testing.assert_close(turned, coupling, rtol=0, atol=1e-12)
    assert float(coupling.norm()) == pytest.approx(1.0, abs=1e-14)
    wanted = pytest.importorskip("e3nn.o3").wigner_3j(*degrees, dtype=torch.float64)
    assert abs(float((coupling * wanted).sum())) == pytest.approx(1.0, abs=1e-12)


def test_scalars_and_vectors():
    torch.testing.assert_close(gaunt_coupling(1, 1, 0)[..., 0], torch.eye(3).double() / 3**0.5)
