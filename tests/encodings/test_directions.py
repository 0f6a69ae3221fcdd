"""Rules of directions: what they average exactly, the promise, which is chosen."""

import math

import pytest
import torch
from euclidean import bessel, harmonics, product_rule

from tg_equiattn.encodings import direction_rule
from tg_equiattn.encodings.directions import quadrature_error
from tg_equiattn.encodings.lebedev import DEGREES, lebedev_rule


def double_factorial(n):
    return math.prod(range(n, 0, -2))


@pytest.mark.parametrize("degree", DEGREES)
def test_polynomials_are_averaged_exactly(degree):
    points, weights = lebedev_rule(degree)
    torch.testing.assert_close(points.norm(dim=1), torch.ones(len(points)).double(), rtol=0, atol=1e-14)
    assert weights.min() > 0
    generator = torch.Generator().manual_seed(degree)
    for _ in range(20):
        a = int(torch.randint(degree + 1, (), generator=generator))
        b = int(torch.randint(degree - a + 1, (), generator=generator))
        c = int(torch.randint(degree - a - b + 1, (), generator=generator))
        got = (weights * points[:, 0] ** a * points[:, 1] ** b * points[:, 2] ** c).sum()
        odd = a % 2 or b % 2 or c % 2
        factors = [double_factorial(n - 1) for n in (a, b, c)]
        wanted = 0.0 if odd else math.prod(factors) / double_factorial(a + b + c + 1)
        assert abs(float(got) - wanted) < 1e-14


def test_the_next_degree_is_not():
    """Negative control: a power of a coordinate that the rule is too small for."""
    points, weights = lebedev_rule(11)
    assert abs(float((weights * points[:, 2] ** 12).sum()) - 1 / 13) > 1e-5


def worst_error(rule, phase, lmax):
    """At random separations within ``phase``, by closed forms, relative to the largest value of each degree."""
    directions, weights = rule
    separations = torch.nn.functional.normalize(torch.randn(300, 3, dtype=torch.float64), dim=-1)
    phases = phase * torch.rand(300, dtype=torch.float64) ** 0.2
    angle = phases[:, None] * (separations @ directions.T)
    every = torch.linspace(1e-3, 1, 100, dtype=torch.float64) * phase
    worst = 0.0
    for degree in range(lmax + 1):
        waves = angle.sin() if degree % 2 else angle.cos()
        mean = (waves * weights) @ torch.stack(harmonics(directions)[degree], 1)
        exact = bessel(phases)[degree][:, None] * torch.stack(harmonics(separations)[degree], 1)
        apart = (mean - (-1 if degree == 2 else 1) * exact).norm(dim=1).max()
        worst = max(worst, float(apart / bessel(every)[degree].abs().max() / math.sqrt(2 * degree + 1)))
    return worst


@pytest.mark.parametrize("error", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize(("phase", "lmax"), [(1.0, 0), (math.pi, 0), (math.pi, 1), (2.5 * math.pi, 2)])
def test_the_promise_is_kept(phase, lmax, error):
    rule = direction_rule(phase, lmax, error)
    assert worst_error(rule, phase, lmax) <= error
    assert float(rule[1].sum()) == pytest.approx(1, abs=1e-14)
    both = torch.cat([rule[0], -rule[0]])
    assert len(torch.unique(both.round(decimals=12) + 0.0, dim=0)) == len(both)  # one of each pair


def test_the_smallest_rule_is_chosen():
    assert [2 * len(direction_rule(math.pi, 0, error)[0]) for error in (1e-3, 1e-6, 1e-10)] == [38, 50, 86]
    degree = DEGREES[DEGREES.index(15) - 1]
    assert quadrature_error(*lebedev_rule(degree), math.pi, 1) > 1e-6 >= quadrature_error(*lebedev_rule(15), math.pi, 1)


def test_another_rule_agrees():
    """An independent one, of the product kind; it takes more points for the same degree."""
    points, weights = product_rule(23)
    assert quadrature_error(points, weights, 2 * math.pi, 1) < 1e-8
    assert len(points) > 1.4 * len(lebedev_rule(23)[0])


def test_rules_are_made_anew_for_training():
    """Also where the first call is in inference mode."""
    with torch.inference_mode():
        directions, _ = direction_rule(1.2345, 1)
    pos = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    (pos @ directions.T).cos().sum().backward()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("max_phase must be a positive number, got 0", (0,)),
        ("max_phase must be a positive number, got nan", (math.nan,)),
        ("error must be a positive number", (1.0, 0, 0.0)),
        (r"lmax must be an integer in \[0, 8\], got -1", (1.0, -1)),
        (r"lmax must be an integer in \[0, 8\], got 1.0", (1.0, 1.0)),
        (r"error must be at least .* for max_frequency=60 and lmax=0", (60.0,)),
        ("error must be at least", (math.pi, 1, 1e-30)),
    ],
)
def test_bad_arguments(message, arguments):
    with pytest.raises(ValueError, match=message):
        direction_rule(*arguments)
