"""Kernels that oscillate: against their definition, through waves, and against images of all nodes."""

import itertools

import pytest
import torch
from space import error

from tg_equiattn.encodings.harmonics import solid_harmonics
from tg_equiattn.functional import EwaldKernels, ewald_attention
from tg_equiattn.functional.waves.radial import cosine_functions

BOUNDS = ((0.8, 1.0), (1.0, 1.2), (0.9, 1.1), (1.0, 1.2))
FASTEST = 2.0, 4.0
PROMISED = 1e-4


def kernels(lmax=1, heads=1, **options):
    """A Gaussian, a potential and two ripples a head."""
    lows = torch.tensor([low for low, _ in BOUNDS], dtype=torch.float64)
    widths = lows * (1 + 0.2 * torch.rand(heads, 4, dtype=torch.float64))
    gains = torch.randn(heads, 4, lmax + 1, dtype=torch.float64)
    waves = torch.tensor(FASTEST, dtype=torch.float64) * (0.5 + 0.5 * torch.rand(heads, 2, dtype=torch.float64))
    return EwaldKernels(widths, gains, BOUNDS, 1, PROMISED, wavenumbers=waves, fastest=FASTEST, **options)


def operands(count, heads=1, spread=2.0):
    q, k = torch.randn(2, count, heads, 4, 3, dtype=torch.float64)
    return q, k, torch.randn(count, heads, 2, dtype=torch.float64), spread * torch.rand(count, 3).double()


def ripple(r, s, wavenumber):
    square = r.square().sum(-1)
    return (-square / (2 * s**2)).exp() * (wavenumber * square.sqrt()).cos()


def test_definition():
    """By differentiation, every pair of nodes of ripples alone, one at a time."""
    ker, (q, k, v, pos) = kernels(lmax=2), operands(5)
    q[:, :, :2] = 0
    expected = torch.zeros(5, 2, 9, dtype=torch.float64)
    unit = torch.eye(3, dtype=torch.float64)
    first = solid_harmonics(unit, 1)[:, 1:]
    second = torch.stack([
        solid_harmonics(unit[a] + unit[b], 2)[4:] - solid_harmonics(unit[a], 2)[4:] - solid_harmonics(unit[b], 2)[4:]
        for a in range(3) for b in range(3)
    ]) / 2  # fmt: skip
    for i, j in itertools.permutations(range(5), 2):
        for c in (2, 3):
            s, wavenumber = ker.widths[0, c], ker.wavenumbers[0, c - 2]

            def of(x, s=s, wavenumber=wavenumber):
                return ripple(x, s, wavenumber)

            apart, length = pos[i] - pos[j], (s**-2 + wavenumber**2) ** -0.5
            slope = torch.autograd.functional.jacobian(of, apart)
            bend = torch.autograd.functional.hessian(of, apart)
            found = torch.cat([of(apart)[None], length * slope @ first, length**2 * bend.flatten() @ second])
            gains = ker.gains[0, c].repeat_interleave(torch.tensor([1, 3, 5]))
            expected[i] += (q[i, 0, c] @ k[j, 0, c]) * torch.outer(v[j, 0], gains * found)
    others = ewald_attention(q, k, v, pos, ker, method="pairs")
    for i in range(5):
        others[i] -= ewald_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], pos[i : i + 1], ker, method="pairs")[0]
    assert error(others.view(5, 2, 9), expected) <= 1e-10


def test_cosine_functions():
    """Against differentiation; at 0 too, in both precisions, all derivatives the next ones."""
    y = torch.tensor([0.0, 1e-9, 0.3, 1.9, 4.4, 4.6, 12.0, 300.0], dtype=torch.float64)
    found = cosine_functions(y, 3)
    x = (2 * y).sqrt()
    torch.testing.assert_close(found[0], x.cos(), rtol=0, atol=1e-13)
    torch.testing.assert_close(found[1], torch.sinc(x / torch.pi), rtol=0, atol=1e-13)
    torch.testing.assert_close(found[2, 0], torch.tensor(1 / 3).double())
    for other in (cosine_functions(y.float(), 3).double(), cosine_functions(y, 6)[:4]):
        torch.testing.assert_close(other, found, rtol=0, atol=2e-5)
    at = y.clone().requires_grad_()
    slope = torch.autograd.grad(cosine_functions(at, 2).sum(), at, create_graph=True)[0]
    torch.testing.assert_close(slope, -found[1:4].sum(0))
    bend = torch.autograd.grad(slope.sum(), at)[0]
    torch.testing.assert_close(bend, cosine_functions(y, 4)[2:].sum(0))


@pytest.mark.parametrize("lmax", [0, 2])
def test_waves_are_the_pairs(lmax):
    """Of an open cloud, to what is promised; and in a cell, against its images in the open."""
    ker, (q, k, v, pos) = kernels(lmax), operands(7)
    exact = ewald_attention(q, k, v, pos, ker, method="pairs")
    assert error(ewald_attention(q, k, v, pos, ker, method="waves"), exact) <= PROMISED
    q[:, :, 1] = 0  # potentials go on for ever
    cell = 3.0 * torch.eye(3, dtype=torch.float64)
    cell[1, 0] = 0.4
    images = torch.cartesian_prod(*[torch.arange(-3.0, 4.0)] * 3).double() @ cell
    images = images[images.norm(dim=1).argsort()]
    around = (pos[None] + images[:, None]).reshape(-1, 3)
    many = [x.repeat(len(images), *[1] * (x.ndim - 1)) for x in (q, k, v)]
    wanted = ewald_attention(*many, around, ker, method="pairs")[: len(pos)]
    assert error(ewald_attention(q, k, v, pos, ker, cell=cell), wanted) <= PROMISED


def test_wavenumbers_that_cannot_be():
    ker = kernels()
    for options in ({"fastest": (1.0,)}, {"fastest": (1.0, -1.0)}, {"wavenumbers": None}, {"fastest": ()}):
        given = {"wavenumbers": ker.wavenumbers, "fastest": FASTEST} | options
        with pytest.raises(ValueError, match="wavenumbers must be"):
            EwaldKernels(ker.widths, ker.gains, BOUNDS, 1, **given)
    with pytest.raises(ValueError, match=r"gaussians must be in \[0, 2\], got 3"):
        EwaldKernels(ker.widths, ker.gains, BOUNDS, 3, wavenumbers=ker.wavenumbers, fastest=FASTEST)
