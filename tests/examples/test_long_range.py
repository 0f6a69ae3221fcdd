"""Clouds of soft charges, and the study of what a global operator adds to messages of short range."""

import dataclasses
import math

import pytest
import torch
from baselines.ewald_message_passing import SCALE, EwaldMessagePassing
from data.soft_charges import soft_charges
from e3nn import o3
from long_range import PRESETS, Model, predict


def test_soft_charges():
    """Sums over pairs, forces as derivatives of energies, neutral clouds in their box."""
    clouds = soft_charges(3, 6, side=4.0, softness=0.5, seed=1)
    assert (clouds.charges.sum(1) == 0).all()
    assert clouds.positions.min() >= 0
    assert 2 < clouds.positions.max() <= 4
    charges, positions = clouds.charges[1], clouds.positions[1].clone().requires_grad_()
    energy = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        apart = [math.dist(positions[i].tolist(), positions[j].tolist()) for j in others]
        potential = sum(float(charges[j]) / math.sqrt(r * r + 0.25) for j, r in zip(others, apart, strict=True))
        assert float(clouds.potentials[1, i]) == pytest.approx(potential, rel=1e-12)
        for j in others:
            energy = energy + charges[i] * charges[j] / ((positions[i] - positions[j]).square().sum() + 0.25).sqrt() / 2
    assert float(clouds.energies[1]) == pytest.approx(energy.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(energy, positions)
    torch.testing.assert_close(clouds.forces[1], -slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", ["fields", "forces"])
@pytest.mark.parametrize("operator", ["none", "EwaldAttention", "all pairs"])
def test_what_reaches_far(task, operator):
    """A far charge is felt by a global operator alone. Forces are derivatives, and turn with the cloud."""
    settings = dataclasses.replace(PRESETS["quick"], task=(task,), operators=(operator,))
    model = Model(settings).double().eval()
    charges = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double()
    positions = torch.tensor([[[0.0, 0, 0], [1.0, 0.5, 0], [7.0, 7.0, 7.0], [6.5, 7.0, 6.0]]]).double()
    data = [charges, positions, torch.zeros(1, 4, 4).double()]
    out, _ = predict(model, data)
    changed, _ = predict(model, [charges[:, [0, 1, 3, 2]], *data[1:]])
    apart = (changed - out)[:, :2, 1:].abs().max()
    assert apart == 0 if operator == "none" else apart > 1e-4
    turn = o3.rand_matrix(dtype=torch.float64)
    turned, _ = predict(model, [charges, positions @ turn.T, data[2]])
    assert (turned[..., 1:] - out[..., 1:] @ turn.T).abs().max() < 1e-7 * out.abs().max()  # constants are float32


def test_ewald_message_passing():
    """Against the sum over pairs and waves, one by one, k and -k alike; and charges far apart see each other."""
    layer = EwaldMessagePassing(3, max_wavenumber=1.0, spacing=0.4).double()
    x, pos = torch.randn(2, 5, 3).double(), 6 * torch.rand(2, 5, 3).double()
    grid = torch.cartesian_prod(*[torch.arange(-3, 4.0)] * 3).double() * 0.4
    grid = grid[grid.norm(dim=1) <= 1.0]
    assert 2 * len(layer.waves) == len(grid) + 1  # zero is its own mirror image
    centres = torch.linspace(0, 1, 48).double()
    wanted = torch.zeros_like(x)
    given, here = layer.before(x), pos - pos.mean(1, keepdim=True)
    damping = torch.sin(0.2 * here) / (0.2 * here)
    for wave in grid:
        gaussians = torch.exp(-((wave.norm() - centres) * 47).square() / 2)
        filters = layer.up(layer.down(gaussians)) * (1.0 if float(wave.norm()) == 0 else 0.5)
        for box in range(2):
            for i in range(5):
                for j in range(5):
                    phase = torch.cos(wave @ (here[box, i] - here[box, j]))
                    damped = damping[box, i].prod() * damping[box, j].prod()
                    wanted[box, i] += damped * phase * filters * given[box, j]
    out = layer(x, pos)
    torch.testing.assert_close(out, layer.after(SCALE * wanted), rtol=1e-5, atol=1e-5)  # the waves are in float32
    moved = pos.clone()
    moved[:, 0] += 0.5
    assert (layer(x, moved) - out)[:, 1:].abs().min() > 1e-6
