"""The charged particles against a slow simulation and known errors of linear motion; the point cloud examples run."""

import sys

import pytest
import torch
from running import EXAMPLES, evaluate, run

sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def particles():
    import charged_particles

    return charged_particles


def slow_force(positions, charges, i):
    total = torch.zeros(3, dtype=torch.float64)
    for j in range(len(positions)):
        if j != i:
            r = positions[i] - positions[j]
            total += charges[i] * charges[j] * r / r.norm() ** 3
    return total.clamp(-100, 100)


def test_simulation_equals_a_slow_one(particles):
    short = particles.simulate(3, seed=7, particles=4, steps=100, progress=False)
    for system in range(3):
        position, velocity = short.positions[system, 0].clone(), short.velocities[system, 0].clone()
        charges = short.charges[system]
        assert velocity.norm(dim=-1).allclose(torch.tensor(0.5, dtype=torch.float64))
        assert charges.abs().eq(1).all()
        for _ in range(100):
            force = torch.stack([slow_force(position, charges, i) for i in range(4)])
            velocity = velocity + 0.001 * force
            position = position + 0.001 * velocity
        torch.testing.assert_close(short.positions[system, 1], position, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(short.velocities[system, 1], velocity, rtol=1e-9, atol=1e-9)


def test_momentum_stays_and_seeds_count(particles):
    one, same, other = (particles.simulate(5, seed, steps=200, progress=False) for seed in (3, 3, 4))
    torch.testing.assert_close(one.positions, same.positions, rtol=0, atol=0)
    assert not torch.equal(one.positions, other.positions)
    momentum = one.velocities.sum(2)
    torch.testing.assert_close(momentum[:, -1], momentum[:, 0], rtol=1e-9, atol=1e-9)


def test_linear_motion_has_the_known_error(particles):
    """From the start to step 1,000: 0.078 with t = 1 on this simulator; heavy tails leave some spread."""
    data = particles.simulate(3000, seed=1, steps=1000, progress=False)
    error, _ = particles.linear_error(data.positions[:, 0], data.velocities[:, 0], data.positions[:, 10], 1.0)
    assert 0.070 < error < 0.086


def test_linear_motion_on_the_standard_task(particles):
    """Frame 30 to 40: 0.112 to 0.115 with t = 1, and 0.087 to 0.088 with the best t, about 0.73."""
    data = particles.simulate(1500, seed=1, steps=4200, progress=False)
    task = data.positions[:, 31], data.velocities[:, 31], data.positions[:, 41]
    error, _ = particles.linear_error(*task, 1.0)
    best, time = particles.linear_error(*task)
    assert 0.099 < error < 0.127
    assert 0.075 < best < 0.099
    assert 0.66 < time < 0.80


def test_cache(particles, tmp_path):
    first = particles.cached(2, 0, 3, 100, tmp_path)
    again = particles.cached(2, 0, 3, 100, tmp_path)
    assert torch.equal(first.positions, again.positions)
    assert len(list(tmp_path.iterdir())) == 1
    particles.cached(2, 1, 3, 100, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


SMALL = ("--train", 60, "--validation", 20, "--test", 20, "--epochs", 1, "--vectors", 4, "--scalars", 3, "--depth", 1)


def test_nbody(tmp_path):
    result = run("nbody.py", *SMALL, "--task", "initial", "--augment", "--cache", tmp_path, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    errors = {row[0].strip(): float(row[1]) for row in rows}
    assert len(errors) == 7
    assert all(0 < error < 10 for error in errors.values())
    ratios = {row[0].strip(): float(row[2]) for row in rows}
    linear = errors["linear, t = 1"]
    assert all(abs(ratios[name] - error / linear) < 2e-3 / linear for name, error in errors.items())
    assert (tmp_path / "errors.png").stat().st_size > 5000


def test_associative_recall(tmp_path):
    result = run("associative_recall.py", "--train", 32, "--held-out", 8, "--epochs", 1, "--lengths", 6, 10,
                 "--vectors", 4, "--scalars", 3, "--depth", 1, "--output", tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert len(rows) == 2 + 2 * 5
    assert (tmp_path / "errors.png").stat().st_size > 5000


def test_associative_recall_sequences():
    from associative_recall import Recall, sequences, vocabularies

    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabularies(7, 4, generator)
    lengths = vocabulary.norm(dim=-1)
    assert lengths.min() >= 1
    assert lengths.max() <= 4
    tokens, answers = sequences(vocabulary, 10, generator)
    assert tokens.shape == (7, 11, 3)
    for sequence, answer in zip(tokens, answers, strict=True):
        seen = (sequence[:10:2] == sequence[-1]).all(-1).nonzero().flatten()
        assert len(seen)
        assert (sequence[2 * seen + 1] == answer).all()
    fixed = Recall(8, 4, 10, 0, vocabulary[:1], fresh=True)
    (first, _), (again, _) = (fixed.__getitems__([0, 3]) for _ in range(2))
    assert not torch.equal(first, again)  # turned by other rotations
    torch.testing.assert_close(first @ first.mT, again @ again.mT, rtol=1e-4, atol=1e-4)
    fresh, kept = Recall(8, 4, 10, 0, None, fresh=True), Recall(8, 4, 10, 0, vocabulary[:1], fresh=False)
    assert not torch.equal(fresh.__getitems__([0])[0], fresh.__getitems__([0])[0])
    assert torch.equal(kept.__getitems__([0])[0], kept.__getitems__([0])[0])
    assert not torch.equal(kept.tokens[0], kept.tokens[1])


def test_e3nn_mixed_model(tmp_path):
    result = run("e3nn_mixed_model.py", "--train", 12, "--particles", 6, "--epochs", 1, "--batch", 6,
                 "--cache", tmp_path, "--output", tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in (tmp_path / "table.md").read_text().splitlines()[3:]]
    assert len(rows) == 4
    assert all(float(row[-1]) < 1e-5 for row in rows)


def test_long_context_benchmark(tmp_path):
    result = run("benchmarks/long_context.py", "--tokens", 20, 31, "--lengths", 17, "--repeats", 1, "--directions",
                 "forward", "--rates", 1e10, 1e11, 1e9, "--layers", "hyena", "attention", "pairs", "--output",
                 tmp_path / "table.md")  # fmt: skip
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "table.md").read_text()
    assert text.count("| forward |") == 2 + 2 * 3
    assert text.count("times faster than attention, streamed") == 2
    assert (tmp_path / "table.png").stat().st_size > 5000


def test_benchmark_baselines_compute_the_same():
    code = """
import torch
from long_context import SCALARS, VECTORS, LongConv, PublishedConv, build
q, k = torch.randn(2, 3, 19, 3)
torch.testing.assert_close(PublishedConv()(q, k), LongConv()(q, k), rtol=1e-4, atol=1e-5)
streamed, pairs = build("attention"), build("pairs")
pairs.load_state_dict(streamed.state_dict())
scalars, vectors = torch.randn(2, 13, SCALARS), torch.randn(2, 13, VECTORS, 3)
for got, wanted in zip(streamed(scalars, vectors), pairs(scalars, vectors)):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
print("equal")
"""
    assert evaluate(code) == "equal"
