"""Clifford MLPs against a slow evaluation by Pauli matrices, equivariance, blocks of tokens, errors."""

import pytest
import torch
from clouds import close, gradients
from oracles import SIZES, clifford_mlp
from space import broken_cross_product, error, motion, move_multivectors

from tg_equiattn.chains.clifford import Grades, MultivectorMLP
from tg_equiattn.nn import CliffordMLP
from tg_equiattn.testing import TOLERANCE

IN, OUT = 3, 5
OPTIONS = {"one block": {}, "two blocks": {"num_blocks": 2}}


@pytest.fixture
def make(randomise):
    def make(name, dtype=torch.float64):
        return randomise(CliffordMLP(IN, OUT, **OPTIONS[name])).to(dtype)

    return make


FEW, MANY = 11, 151  # tokens, of one form each


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_definition(name, tokens, make, device):
    mlp, x = make(name), torch.randn(2, tokens, IN, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.cat(clifford_mlp(mlp.mlp, x.flatten(0, 1).split(SIZES, -1)), -1).unflatten(0, (2, tokens))
    inputs = [x, *mlp.parameters()]
    wanted, out = gradients([expected], inputs), mlp.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    got = [g.cpu() for g in gradients([out], inputs)]
    torch.testing.assert_close(got, [g.cpu() for g in wanted], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [FEW, 3 * MANY])
def test_some_grades_only(tokens, bias, randomise):
    mlp = randomise(MultivectorMLP(Grades(2, 3), Grades(0, 1, 2, 0), 5, bias=bias)).double()
    x = [torch.randn(tokens, c, n, dtype=torch.float64) for c, n in zip((2, 3, 0, 0), SIZES, strict=True)]
    out, wanted = [part.permute(2, 1, 0) for part in mlp([part.permute(2, 1, 0) for part in x])], clifford_mlp(mlp, x)
    close(out, wanted, 1e-11)
    weights = list(mlp.parameters())
    close(gradients(out, weights), gradients(wanted, weights), 1e-9)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, name, reflect, make, device):
    mlp, x = make(name, dtype).to(device), torch.randn(31, IN, 8, dtype=dtype, device=device)
    r = motion(dtype, reflect, device)
    assert error(mlp(move_multivectors(x, r)), move_multivectors(mlp(x), r)) <= TOLERANCE[dtype]


def test_broken_layers_are_seen(make):
    mlp, x, r = make("one block"), torch.randn(2 * MANY, IN, 8, dtype=torch.float64), motion()

    def broken(f):
        return error(f(move_multivectors(x, r)), move_multivectors(f(x), r))

    assert broken(mlp) <= 1e-10
    assert broken(lambda x: mlp(x[..., [0, 2, 1, 3, 4, 5, 6, 7]])) > 1e-2
    assert broken(lambda x: mlp(torch.cat([x[..., 1:2], x[..., 1:]], -1))) > 1e-3
    with broken_cross_product():
        assert broken(mlp) > 1e-3


def test_finite_derivatives_at_zero(make):
    mlp, x = make("two blocks"), torch.zeros(2, IN, 8, dtype=torch.float64, requires_grad=True)
    out = mlp(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert all(part.isfinite().all() for part in (out, grad, x.grad))
