"""Dropout by hashing: unbiased, independent from weight to weight, and a function of seed and place alone."""

import pytest
import torch

from tg_equiattn.functional.group import hashed_dropout


def draw(rate, seed=0, rows=1500, columns=700, device="cpu"):
    row, column = hashed_dropout.hashes(rows, columns, torch.tensor(seed, device=device))
    return hashed_dropout.keep(row[:, None], column, rate, torch.float64).cpu()


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.9])
def test_rate_and_independence(rate, device):
    """Means over all, rows and columns, and correlations of neighbors and of seeds, within five deviations."""
    kept = draw(rate, device=device)
    assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
    z = (kept - 1) / (rate / (1 - rate)) ** 0.5  # mean 0 and variance 1
    assert abs(float(z.sum())) < 5 * z.numel() ** 0.5
    for axis in (0, 1):
        assert float(z.mean(axis).abs().max()) < 6 / z.shape[axis] ** 0.5
    others = [z.roll(1, 0), z.roll(1, 1), z.roll((1, -1), (0, 1)), z.roll(2, 1), z.roll(64, 0)]
    others.append((draw(rate, seed=1, device=device) - 1) / (rate / (1 - rate)) ** 0.5)
    for other in others:
        assert abs(float((z * other).sum())) < 5 * z.numel() ** 0.5


def test_a_function_of_seed_and_place(device):
    whole = draw(0.4, seed=3, device=device)
    assert torch.equal(whole, draw(0.4, seed=3))
    assert not torch.equal(whole, draw(0.4, seed=4, device=device))
    row, column = hashed_dropout.hashes(1500, 700, torch.tensor(3, device=device))
    part = hashed_dropout.keep(row[7:9, None], column[5:20], 0.4, torch.float64)
    assert torch.equal(part.cpu(), whole[7:9, 5:20])
