"""Euclidean fast attention against the double sum of its limit and the published formula; derivatives, batches."""

import math

import pytest
import torch
from attention_operands import Largest
from euclidean import double_sum, operands, product_rule, published
from space import error, motion

from tg_equiattn.encodings import direction_rule
from tg_equiattn.functional import euclidean_fast_attention

WIDTH = 2.0
RULE = direction_rule(math.pi, 2, 1e-10)  # what operands hold


def attend(query, key, value, pos, frequencies, *, rule=RULE, **options):
    """One cloud, harmonics on an axis of their own."""
    out = euclidean_fast_attention(query, key, value, pos, frequencies, rule, **options)
    return out.unflatten(-1, (value.shape[-1], -1))


def inputs(*shape, **options):
    return [x.requires_grad_() for x in operands(*shape, **options)]


def gradients(out, x):
    generator = torch.Generator().manual_seed(3)
    return torch.autograd.grad((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum(), x)


@pytest.mark.parametrize("lmax", [0, 1, 2])
def test_pairs_equal_the_double_sum(lmax):
    x = inputs(5)
    got, wanted = attend(*x, lmax=lmax, method="pairs"), double_sum(*x, lmax)
    assert error(got, wanted) < 1e-12
    assert error(gradients(got, x), gradients(wanted, x)) < 1e-10


@pytest.mark.parametrize("backend", ["torch", "plain"])
@pytest.mark.parametrize("lmax", [0, 1, 2])
def test_directions_equal_the_published_formula(lmax, backend):
    """With the same rule to rounding, with another to the error of both."""
    x = inputs(7)
    got = attend(*x, lmax=lmax, method="directions", backend=backend)
    both = torch.cat([RULE[0], -RULE[0]]), torch.cat([RULE[1], RULE[1]]) / 2
    wanted = published(*x, *both, lmax)
    assert error(got, wanted) < 1e-13
    assert error(gradients(got, x), gradients(wanted, x)) < 1e-12
    assert error(got, published(*x, *product_rule(21), lmax)) < 1e-8


@pytest.mark.parametrize("promised", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("lmax", [0, 1, 2])
def test_directions_agree_with_pairs_to_the_promised_error(lmax, promised):
    """Outputs, forces, gradients of frequencies."""
    x = inputs(70)
    rule = direction_rule(math.pi, lmax, promised)
    got, wanted = (attend(*x, rule=rule, lmax=lmax, method=method) for method in ("directions", "pairs"))
    assert error(got, wanted) <= promised
    assert error(gradients(got, x), gradients(wanted, x)) <= 10 * promised  # a derivative brings a factor of phases
    if promised == 1e-10:
        assert error(attend(*x, rule=direction_rule(math.pi, lmax, 0.1), lmax=lmax), wanted) > 1e-5


def test_auto_takes_pairs_for_small_clouds():
    """And then needs no rule."""
    small, large = operands(63), operands(64)
    coarse = direction_rule(1.0, 1, 0.1)
    options = {"lmax": 1, "rule": coarse}
    assert torch.equal(attend(*small, **options), attend(*small, method="pairs", **options))
    assert torch.equal(attend(*large, **options), attend(*large, method="directions", **options))
    assert torch.equal(attend(*large, lmax=1, rule=None), attend(*large, method="pairs", **options))


@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_a_product_of_ones_own(method):
    """Mixes channels with harmonics where there is one table a cloud, with weights of its heads."""
    x = operands(9, heads=2, values=5)
    weight = torch.randn(2, 5, 4, 9, dtype=torch.float64)

    def product(features, harmonics, degree):
        part = slice(degree**2, (degree + 1) ** 2)
        return torch.einsum("...hv,hvel,...l->...he", features, weight[..., part], harmonics.squeeze(-2))

    def spread(features, harmonics, degree):  # einsum wants harmonics of every node
        shape = torch.broadcast_shapes(features.shape[:-2], harmonics.shape[:-2])
        return product(features.expand(*shape, *features.shape[-2:]), harmonics.expand(*shape, 1, -1), degree)

    got = euclidean_fast_attention(*x, RULE, lmax=2, product=spread, method=method)
    wanted = torch.einsum("nhvl,hvel->nhe", attend(*x, lmax=2, method=method), weight)
    assert error(got, wanted) < 1e-12


@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_second_derivatives(method):
    """Also where two points meet."""
    query, key, value, pos, frequencies = operands(4, 1, 2, 2, 2)
    pos[1] = pos[0]
    x = [t.requires_grad_() for t in (query, key, value, pos, frequencies)]
    call = lambda *x: attend(*x, rule=direction_rule(math.pi, 1, 0.1), lmax=1, method=method)  # noqa: E731
    assert torch.autograd.gradcheck(call, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_third_derivatives(method):
    """Those of the operators' second derivatives, against transforms of the plain compositions."""
    x = operands(5, 1, 2, 2, 2)
    steps = [torch.randn_like(t) for t in x]

    def along(t):
        return attend(*(a + t * s for a, s in zip(x, steps, strict=True)), lmax=1, method=method).sin().sum()

    t = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    value, expected = along(t), along
    for _ in range(3):
        (value,) = torch.autograd.grad(value, t, create_graph=True)
        expected = torch.func.grad(expected)
    torch.testing.assert_close(value, expected(t.detach()), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("method", "nodes"), [("pairs", 190), ("directions", 700)])
def test_in_blocks(method, nodes):
    """More nodes than a block takes: first and second derivatives, against the plain composition of directions."""
    x = inputs(nodes, frequencies=8, heads=1, components=1, values=3)
    results = []
    for options in ({"method": method}, {"method": "directions", "backend": "plain"}):
        out = attend(*x, lmax=1, **options)
        grads = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        results.append((out, *grads, *torch.autograd.grad(sum(g.sin().sum() for g in grads[:4]), x)))
    assert error(*results) < (1e-7 if method == "pairs" else 1e-10)


@pytest.mark.parametrize(("method", "nodes"), [("pairs", 500), ("directions", 3000)])
def test_nothing_of_all_nodes_and_features_is_held(method, nodes):
    x = [t.float().requires_grad_() for t in operands(nodes, heads=1, frequencies=8, components=1, values=5)]
    rule = tuple(t.float() for t in direction_rule(math.pi, 1))
    with Largest() as largest:
        out = attend(*x, rule=rule, lmax=1, method=method)
        out.sum().backward()
    features = nodes * (2 * len(rule[0]) * 8 * 2 if method == "directions" else 8 * nodes)
    assert largest.count < features / 4


@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_permutations_translations_and_far_from_the_origin(method):
    query, key, value, pos, frequencies = operands(70)
    call = lambda *x: euclidean_fast_attention(*x, frequencies, RULE, lmax=1, method=method)  # noqa: E731
    out, order = call(query, key, value, pos), torch.randperm(70)
    assert error(call(*(t[order] for t in (query, key, value, pos))), out[order]) < 1e-12
    assert error(call(query, key, value, pos + torch.tensor([3.0, -2.0, 1.0])), out) < 1e-12
    far = torch.tensor([5e5, 5e6, 2e2]).double()
    low = [t.float() for t in (query, key, value)]
    got = euclidean_fast_attention(
        *low, pos + far, frequencies.float(), [t.float() for t in RULE], lmax=1, method=method
    )
    assert got.dtype == torch.float32
    assert error(got.double(), out) < 1e-5


@pytest.mark.parametrize("method", ["pairs", "directions"])
@pytest.mark.parametrize("reflect", [False, True])
def test_rotations_and_reflections(method, reflect):
    """Of invariants exactly by pairs, to the promised error by directions; not where positions are replaced."""
    query, key, value, pos, frequencies = operands(70)
    r = motion(reflect=reflect)
    call = lambda pos, **o: attend(query, key, value, pos, frequencies, method=method, **o)  # noqa: E731
    out = call(pos)
    tolerance = 1e-12 if method == "pairs" else 1e-10
    assert error(call(pos @ r.T), out) < tolerance
    vectors = lambda pos: call(pos, lmax=1)[..., 1:]  # noqa: E731
    assert error(vectors(pos @ r.T), vectors(pos) @ r.T) < tolerance
    stretched = pos * torch.tensor([1.0, 1.2, 0.8])
    assert error(call(stretched), out) > 1e-3
    assert error(call(stretched @ r.T), call((pos @ r.T) * torch.tensor([1.0, 1.2, 0.8]))) > 1e-3


def test_beyond_the_radius_errors_are_bounded():
    """Weights of a rule are positive and add up to 1: no kernel exceeds the largest harmonic, no error twice that."""
    rule = direction_rule(math.pi, 0)
    query = torch.zeros(2, 1, 1, 2, 1, dtype=torch.float64)
    query[:, :, :, 0] = 1
    value, frequencies = torch.tensor([0.0, 1.0]).double().view(2, 1, 1), torch.tensor([math.pi]).double()
    worst = {}
    for stretch in (1.0, 1.5, 2.0, 10.0):
        errors = []
        for _ in range(30):
            direction = torch.nn.functional.normalize(torch.randn(3, dtype=torch.float64), dim=0)
            pos = torch.stack([stretch * direction, 0 * direction])
            got, wanted = (
                euclidean_fast_attention(query, query, value, pos, frequencies, rule, method=method)[0, 0, 0]
                for method in ("directions", "pairs")
            )
            errors.append(float((got - wanted).abs()) * math.sqrt(2))
        worst[stretch] = max(errors)
    assert worst[1.0] <= 1e-6
    assert worst[1.5] <= 1e-3
    assert worst[2.0] <= 0.05
    assert worst[10.0] <= 2


@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_forces_are_smooth_where_points_exchange_radii(method):
    """Central differences of the energy along such a path, and no jump of the output."""
    query, key, value, pos, frequencies = operands(12)
    pos[1] = pos[0].flip(0) * (1 + 1e-9)  # as far from the origin as the first
    step = torch.zeros_like(pos)
    step[0], step[1] = pos[0], -pos[1]
    call = lambda pos: attend(query, key, value, pos, frequencies, lmax=1, method=method)  # noqa: E731
    jump = call(pos + 1e-7 * step) - call(pos - 1e-7 * step)
    assert jump.abs().max() < 1e-5

    def slope(t):
        moved = (pos + t * step).requires_grad_()
        (grad,) = torch.autograd.grad(call(moved).sin().sum(), moved)
        return float((grad * step).sum())

    for t in (-1e-3, 0.0, 1e-3):
        energies = [float(call(pos + (t + s) * step).sin().sum()) for s in (1e-5, -1e-5)]
        assert slope(t) == pytest.approx((energies[0] - energies[1]) / 2e-5, rel=1e-6, abs=1e-6)


def test_without_positions_in_it_attention_is_blind():
    """Negative control: with all frequencies zero, points may be anywhere."""
    query, key, value, pos, frequencies = operands(9)
    out, moved = (attend(query, key, value, p, 0 * frequencies) for p in (pos, torch.randn_like(pos)))
    assert error(moved, out) < 1e-12
    assert error(attend(query, key, value, torch.randn_like(pos), frequencies), out) > 1e-2
