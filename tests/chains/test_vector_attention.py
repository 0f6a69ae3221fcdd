"""Vector self-attention against all pairs' cross products, tiled, stabilised and ragged."""

import pytest
import torch
from clouds import close, gradients
from oracles import beyond, cross_product_attention

from tg_equiattn.chains import vector_attention as module

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

B, N, C = 3, 11, 2


def vector_attention(q, k, v, lengths=None):
    """Vector attention of padded vectors (B, N, C, 3) by its definition."""
    return module.vector_attention(*(x.transpose(1, 2) for x in (q, k, v)), lengths).transpose(1, 2)


def inputs(n=N, count=B):
    return tuple(torch.randn(count, n, C, 3, dtype=torch.float64).requires_grad_() for _ in range(3))


def plain(*arguments):
    """As transforms see it, by the formula."""
    with torch.autograd.forward_ad.dual_level():
        return vector_attention(*arguments)


@pytest.mark.parametrize("sizes", [(11, 11, 11), (11, 1, 6), (0, 3, 11)])
@pytest.mark.parametrize("size", [1, 0.0, 200.0])
@pytest.mark.parametrize("attention", [vector_attention, plain])
def test_equals_the_definition(attention, size, sizes, device):
    """With scores of several hundred, where exponentials overflow. NaN beyond the own lengths is never read."""
    q, k, v = inputs()
    qkv = (size * q).detach().requires_grad_(), k, v
    lengths, holes = None if min(sizes) == N else torch.tensor(sizes, device=device), [beyond(x, sizes) for x in qkv]
    out, expected = attention(*(x.to(device) for x in holes), lengths).cpu(), cross_product_attention(*qkv, sizes)
    got, wanted = [out, *gradients([out], holes)], [expected, *gradients([expected], qkv)]
    torch.testing.assert_close(got, wanted, rtol=1e-10 if size <= 1 else 1e-7, atol=1e-11 if size <= 1 else 1e-7)


def test_very_large_scores_stay_finite():
    q, k, v = (x.detach().float() for x in inputs())
    qkv = [x.requires_grad_() for x in (3e4 * q, k, v)]
    out = vector_attention(*qkv)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), qkv))
    wanted = cross_product_attention(*qkv, (N,) * B)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2 * float(wanted.detach().abs().max()))


def degenerate():
    """Triples q, k, v where some |q x k| = 0, with lengths or none."""
    q, k, v = (x.detach() for x in inputs(5))
    zero, third = torch.zeros_like(q), torch.tensor([5, 1, 0])
    one_direction = torch.randn(B, 5, C, 1, dtype=torch.float64) * torch.randn(3, dtype=torch.float64)
    return {
        "parallel": (q, 3 * q, v, None),
        "parallel by rounding": (one_direction, 0.7 * one_direction.flip(1), v, None),
        "equal": (q, q, q, None),
        "no query": (zero, k, v, None),
        "no key": (q, zero, v, third),
        "nothing": (zero, zero, zero, None),
        "one token": (q[:, :1], k[:, :1], v[:, :1], None),
        "short": (q, k, v, third),
    }


@pytest.mark.parametrize("name", degenerate())
def test_all_derivatives_are_finite_where_scores_are_zero(name):
    """The derivative of a score of zero is taken as zero."""
    *qkv, lengths = degenerate()[name]
    directions = [torch.randn_like(x) for x in qkv]
    inside = [x.clone().requires_grad_() for x in qkv]
    out = vector_attention(*inside, lengths)
    firsts = torch.autograd.grad(out.sin().sum(), inside, create_graph=True)
    seconds = torch.autograd.grad(sum((g * d).sum() for g, d in zip(firsts, directions, strict=True)), inside)
    function = lambda *t: vector_attention(*t, lengths).sin().sum()  # noqa: E731
    value, tangent = torch.func.jvp(function, tuple(qkv), tuple(directions))
    assert torch.isfinite(torch.stack([value, tangent])).all()
    torch.testing.assert_close(tangent, sum((g * d).sum() for g, d in zip(firsts, directions, strict=True)))
    nested = torch.func.jvp(torch.func.grad(function, argnums=(0, 1, 2)), tuple(qkv), tuple(directions))
    assert all(x.isfinite().all() for x in (*firsts, *seconds))
    close((*nested[0], *nested[1]), (*firsts, *seconds), 1e-6)


def derivatives(attention, qkv, lengths, order):
    total, out = attention(*qkv, lengths).sin().sum(), []
    for _ in range(order):
        out.append(torch.autograd.grad(total, qkv, create_graph=True))
        total = sum((g.sin() * (1 + torch.arange(g.numel()).view_as(g) % 5)).sum() for g in out[-1])
    return [g.detach() for grads in out for g in grads]


@pytest.mark.parametrize(("n", "lengths", "order", "tolerance"), [(23, [20], 2, 1e-9), (4, None, 3, 1e-10)])
def test_higher_derivatives(n, lengths, order, tolerance, monkeypatch):
    """In tiles of five queries, of which the last has fewer."""
    monkeypatch.setattr(module, "TILE_PAIRS", 5 * n)
    qkv, lengths = inputs(n, count=1), lengths and torch.tensor(lengths)
    found = zip(*(derivatives(f, qkv, lengths, order) for f in (vector_attention, plain)), strict=True)
    for got, wanted in found:
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_single_precision_compiles():
    """On a CPU torch's setting of the precision of products is read, which compilers cannot trace."""
    qkv = torch.randn(3, 2, 7, 3, 3)
    found = torch.compile(vector_attention, fullgraph=True, backend="eager")(*qkv)
    torch.testing.assert_close(found, vector_attention(*qkv))
