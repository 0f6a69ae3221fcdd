"""Vector self-attention against all pairs' cross products, tiled, stabilised and ragged."""

import pytest
import torch
from clouds import close, gradients
from oracles import cross_product_attention
from space import error, motion, move

from tg_equiattn.functional import vector_attention
from tg_equiattn.testing import TOLERANCE

B, N, C = 3, 11, 2
HERE = "tg_equiattn.functional.vector"


def inputs(n=N, dtype=torch.float64, device=None, count=B):
    return tuple(torch.randn(count, n, C, 3, dtype=dtype, device=device).requires_grad_() for _ in range(3))


def plain(*arguments):
    """As transforms see it, by the formula."""
    with torch.autograd.forward_ad.dual_level():
        return vector_attention(*arguments)


def compare(out, expected, qkv, rtol=1e-10, atol=1e-11):
    """With gradients."""
    got, wanted = ([x, *gradients([x], qkv)] for x in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("sizes", [(11, 11, 11), (11, 1, 6), (0, 3, 11)])
@pytest.mark.parametrize("size", [1, 0.0, 200.0])
@pytest.mark.parametrize("attention", [vector_attention, plain])
def test_equals_the_definition(attention, size, sizes, device):
    """With scores up to several hundred for the largest queries, where exponentials overflow unless stabilised."""
    q, k, v = inputs()
    qkv = (size * q).detach().requires_grad_(), k, v
    lengths = None if min(sizes) == N else torch.tensor(sizes, device=device)
    out = attention(*(x.to(device) for x in qkv), lengths)
    tolerance = (1e-10, 1e-11) if size <= 1 else (1e-7, 1e-7)
    compare(out.cpu(), cross_product_attention(*qkv, sizes), qkv, *tolerance)


@pytest.mark.parametrize(
    ("count", "n", "sizes"),
    [
        (1, 21, (21,)),  # tiles of 16 and 5 keys, and of 8, 8 and 5 queries
        (3, 17, (17, 0, 16)),
        (15, 4, None),  # 8 groups in one tile, of two channels each
    ],
)
@pytest.mark.parametrize("size", [1, 1000.0])
def test_many_tiles(size, count, n, sizes, monkeypatch):
    """A tile holds so many scores of so many keys at most: these take several, the last ones not full."""
    monkeypatch.setattr(f"{HERE}.cross_product_attention._TILE_SCORES", 128)
    monkeypatch.setattr(f"{HERE}.cross_product_attention._TILE_KEYS", 16)
    q, k, v = inputs(n, count=count)
    qkv = (size * q).detach().requires_grad_(), k, v
    lengths = None if sizes is None else torch.tensor(sizes)
    compare(vector_attention(*qkv, lengths), plain(*qkv, lengths), qkv, 1e-7, 1e-7 * size)


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
    """Up to this order, along fixed directions."""
    total, out = attention(*qkv, lengths).sin().sum(), []
    for _ in range(order):
        out.append(torch.autograd.grad(total, qkv, create_graph=True))
        total = sum((g.sin() * (1 + torch.arange(g.numel()).view_as(g) % 5)).sum() for g in out[-1])
    return [g.detach() for grads in out for g in grads]


@pytest.mark.parametrize(("n", "lengths", "order", "tolerance"), [(23, [20], 2, 1e-9), (4, None, 3, 1e-10)])
def test_higher_derivatives(n, lengths, order, tolerance, monkeypatch):
    """Second derivatives go through blocks of queries, here of 5, the last not full; those of the plain formula through
    as many, checkpointed."""
    monkeypatch.setattr(f"{HERE}.plain_attention._BLOCK_PAIRS", 256)
    qkv, lengths = inputs(n, count=1), lengths and torch.tensor(lengths)
    found = zip(*(derivatives(f, qkv, lengths, order) for f in (vector_attention, plain)), strict=True)
    for got, wanted in found:
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, reflect, device):
    q, k, v = (x.detach() for x in inputs(31, dtype, device))
    r, lengths = motion(dtype, reflect, device), torch.tensor([31, 1, 17], device=device)
    wanted = move(vector_attention(q, k, v, lengths), r)
    moved = (move(x, r) for x in (q, k, v))
    assert error(vector_attention(*moved, lengths), wanted) <= TOLERANCE[dtype]


def test_permutations(on_device):
    q, k, v = (x.detach() for x in inputs())
    p, other = torch.randperm(N), torch.randperm(N)
    wanted = vector_attention(q, k, v)
    assert error(vector_attention(q[:, p], k[:, p], v[:, p]), wanted[:, p]) <= 1e-10
    moved = vector_attention(q, k[:, other], v[:, other])
    assert error(moved, wanted) <= 1e-10  # of keys with the values that belong to them
    assert error(vector_attention(q, k[:, other], v[:, p]), wanted) > 1e-2


def test_swapped_components_are_seen():
    q, k, v = (x.detach() for x in inputs())
    r, swap = motion(), [1, 0, 2]
    wanted = move(vector_attention(q, k[..., swap], v), r)
    assert error(vector_attention(move(q, r), move(k, r)[..., swap], move(v, r)), wanted) > 1e-2


def test_ragged_equals_alone_whatever_lies_beyond(on_device):
    qkv, sizes = inputs(), (5, 0, 11)
    there = (torch.arange(N) < torch.tensor(sizes)[:, None])[..., None, None]
    holes = [torch.where(there, x.detach(), torch.nan).requires_grad_() for x in qkv]
    out = vector_attention(*holes, torch.tensor(sizes))
    for b, n in enumerate(sizes):
        if n:
            alone = vector_attention(*(x[b : b + 1, :n] for x in qkv))
            torch.testing.assert_close(out[b : b + 1, :n], alone, rtol=1e-12, atol=1e-12)
        assert not out[b, n:].any()
    for grad in torch.autograd.grad(out.sum(), holes):
        assert grad.isfinite().all()
        assert not grad.masked_select(~there).any()


def test_operators_registered():
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    operator = torch.ops.tg_equiattn.vector_attention.default
    q, k, v = (torch.randn(2, 5, 3).double().requires_grad_() for _ in range(3))
    for lengths in (None, torch.tensor([3, 5])):
        torch.library.opcheck(operator, (q, k, v, lengths, torch.ones(2).double()), test_utils=checks)


def test_memory_does_not_grow_with_pairs():
    saved = []
    qkv = [torch.randn(1, 499, 2, 3).requires_grad_() for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        vector_attention(*qkv)
    assert max(saved) <= 9 * 499 * 2


def test_nothing_to_attend():
    for count, n in ((0, 5), (3, 0), (0, 0)):
        x = torch.ones(count, n, C, 3, requires_grad=True)
        out = vector_attention(x, x, x, torch.zeros(count, dtype=torch.int64))
        assert out.shape == x.shape
        assert vector_attention(x, x, x).shape == x.shape
        out.sum().backward()
    x = torch.ones(3, 5, C, 3)
    assert not vector_attention(x, x, x, torch.zeros(3, dtype=torch.int64)).any()


@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2])])
def test_gradgradcheck(lengths):
    qkv = inputs(4, count=2)
    assert torch.autograd.gradgradcheck(lambda *t: vector_attention(*t, lengths), qkv, fast_mode=True)
