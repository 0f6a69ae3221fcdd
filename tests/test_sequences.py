"""Sequences: mixing in groups against one sequence at a time, means, radial order, blocks of tokens."""

import itertools

import pytest
import torch
from space import batch_of, error, motion

from tg_equiattn.orders import check_order, radial_order
from tg_equiattn.sequences import Sequences, token_blocks

SIZES = {
    "equal": (5, 5, 5),
    "groups": (1, 33, 5, 0, 2, 7, 1, 40, 6, 0),
    "one": (11,),
    "empty ends": (0, 3, 0),
    "singles": (1, 1, 1, 1),
}


def kernel(x, y, lengths):
    """Running sums of x over the reversed y of each sequence: every token's place and sequence length matter."""
    n = x.shape[-1]
    own = torch.full((x.shape[-2],), n) if lengths is None else lengths
    there = torch.arange(n) < own[:, None]
    back = (own[:, None] - 1 - torch.arange(n)).clamp(min=0).expand_as(y)
    out = x.cumsum(-1) * y.gather(-1, back) / own.clamp(min=1)[:, None]
    return out.masked_fill(~there, 0)


def alone(x, y):
    return x.cumsum(-1) * y.flip(-1) / max(1, x.shape[-1])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_flat_mix_equals_each_alone(sizes, padded):
    x, y = (torch.randn(3, 2, sum(sizes), dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"batch_size": len(sizes), "max_num_nodes": max(sizes) + 2} if padded else {"batch_size": len(sizes)}
    sequences = Sequences.flat(sum(sizes), batch_of(sizes), torch.device("cpu"), **options)
    assert sequences.sizes.tolist() == list(sizes)
    out = sequences.mix(kernel, x, y)
    expected = torch.cat([alone(*p) for p in zip(x.split(sizes, -1), y.split(sizes, -1), strict=True)], -1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad((out * direction).sum(), (x, y)),
        torch.autograd.grad((expected * direction).sum(), (x, y)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_groups_waste_less_than_half():
    sizes = SIZES["groups"]
    sequences = Sequences.flat(sum(sizes), batch_of(sizes), torch.device("cpu"), len(sizes))
    widths = []
    sequences.mix(lambda x, lengths: widths.append(x.shape[-2:].numel()) or x, torch.randn(1, sum(sizes)))
    assert len(widths) > 2
    assert sum(sizes) < sum(widths) < 2 * sum(sizes)


def test_dense_mix_with_lengths():
    sizes = (5, 0, 7)
    x, y = torch.randn(2, 3, 2, 3, 7, dtype=torch.float64)
    sequences = Sequences.dense(3, 7, torch.tensor(sizes), torch.device("cpu"))
    out = sequences.mix(kernel, x.flatten(-2), y.flatten(-2)).unflatten(-1, (3, 7))
    for b, n in enumerate(sizes):
        torch.testing.assert_close(out[..., b, :n], alone(x[..., b, :n], y[..., b, :n]), rtol=1e-12, atol=1e-12)
        assert not out[..., b, n:].any()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_mix_in_another_order(sizes, padded):
    x, y = torch.randn(2, 3, sum(sizes), dtype=torch.float64)
    starts = [sum(sizes[:b]) for b in range(len(sizes))]
    order = torch.cat([start + torch.randperm(n) for start, n in zip(starts, sizes, strict=True)])
    options = {"batch_size": len(sizes), "max_num_nodes": max(sizes)} if padded else {"batch_size": len(sizes)}
    sequences = Sequences.flat(sum(sizes), batch_of(sizes), torch.device("cpu"), **options)
    check_order(order, sequences)
    out = sequences.ordered(order).mix(kernel, x, y)
    torch.testing.assert_close(out[..., order], sequences.mix(kernel, x[..., order], y[..., order]))


def test_gradients_of_gradients_through_mix():
    sizes = (1, 4, 2)
    sequences = Sequences.flat(7, batch_of(sizes), torch.device("cpu"))
    x, y = (torch.randn(1, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for s in (sequences, sequences.ordered(torch.tensor([0, 3, 1, 4, 2, 6, 5]))):
        assert torch.autograd.gradgradcheck(lambda x, y: s.mix(kernel, x, y), (x, y))  # noqa: B023


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_means_and_centres(sizes):
    x = torch.randn(3, sum(sizes), dtype=torch.float64)
    sequences = Sequences.flat(sum(sizes), batch_of(sizes), torch.device("cpu"), len(sizes))
    expected = torch.stack([p.mean(-1) if p.numel() else torch.zeros(3) for p in x.split(sizes, -1)], -1)
    torch.testing.assert_close(sequences.mean(x), expected, rtol=1e-12, atol=1e-12)
    centred = torch.cat([p - p.mean(-1, keepdim=True) for p in x.split(sizes, -1) if p.numel()], -1)
    torch.testing.assert_close(sequences.centred(x), centred, rtol=1e-12, atol=1e-12)
    far = sequences.centred((x + 1e4).float())
    assert far.dtype == torch.float32
    torch.testing.assert_close(far.double(), centred, rtol=0, atol=2e-3)


def test_means_ignore_padding():
    x, sizes = torch.randn(2, 3, 7, dtype=torch.float64), (5, 0, 7)
    there = torch.arange(7) < torch.tensor(sizes)[:, None]
    holes = torch.where(there, x, torch.nan).flatten(1)
    sequences = Sequences.dense(3, 7, torch.tensor(sizes), torch.device("cpu"))
    got = sequences.mean(holes)
    torch.testing.assert_close(got[:, 0], x[:, 0, :5].mean(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[:, 2], x[:, 2].mean(-1), rtol=1e-12, atol=1e-12)
    assert not got[:, 1].any()
    torch.testing.assert_close(sequences.zero_padding(holes), torch.where(there, x, 0.0).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_sorts_by_distance_in_every_sequence(dtype):
    sizes = (5, 1, 0, 31)
    pos = torch.randn(3, 37, dtype=dtype)
    sequences = Sequences.flat(37, batch_of(sizes), torch.device("cpu"))
    order = radial_order(pos, sequences)
    check_order(order, sequences)
    distance = sequences.centred(pos).norm(dim=0)[order]
    assert all((part.diff() >= 0).all() for part in distance.split(sizes))
    r = motion(dtype, reflect=True)
    assert torch.equal(radial_order(r @ pos + 3, sequences), order)
    p = torch.cat([start + torch.randperm(n) for start, n in ((0, 5), (5, 1), (6, 31))])
    assert torch.equal(p[radial_order(pos[:, p], sequences)], order)


def test_radial_order_keeps_padding_last():
    sizes = torch.tensor([4, 0, 7])
    pos = torch.randn(3, 21, dtype=torch.float64)
    sequences = Sequences.dense(3, 7, sizes, torch.device("cpu"))
    order = radial_order(pos.masked_fill(~sequences.mask, torch.nan), sequences)
    check_order(order, sequences)
    assert order[4:7].tolist() == [4, 5, 6]
    alone = radial_order(pos[:, :4], Sequences.dense(1, 4, None, torch.device("cpu")))
    assert order[:4].tolist() == alone.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_breaks_ties_by_scalars(dtype):
    """A cube's corners lie equally far from its centre; distinct scalars tell them apart, in any pose and order."""
    pos = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=dtype).T
    scalars = torch.randn(2, 8, dtype=dtype)
    sequences = Sequences.dense(1, 8, None, torch.device("cpu"))
    order = radial_order(pos, sequences, scalars)
    for reflect in (False, True):
        p = torch.randperm(8)
        moved = motion(dtype, reflect) @ pos[:, p] + torch.randn(3, 1, dtype=dtype)
        assert torch.equal(p[radial_order(moved, sequences, scalars[:, p])], order)
    assert order.tolist() != list(range(8))
    assert radial_order(pos, sequences).tolist() == list(range(8))  # a symmetry exchanges them: as they came


def test_radial_order_breaks_ties_by_shape():
    """Points on a sphere that no symmetry exchanges."""
    pos = torch.nn.functional.normalize(torch.randn(3, 9, dtype=torch.float64), dim=0)
    pos = torch.cat([pos, -pos], 1)  # centred, so all are equally far; antipodes differ in no second moment
    scalars = (torch.arange(18) < 9).double()[None]
    sequences = Sequences.dense(1, 18, None, torch.device("cpu"))
    order = radial_order(pos, sequences, scalars)
    p = torch.randperm(18)
    assert torch.equal(p[radial_order(motion() @ pos[:, p], sequences, scalars[:, p])], order)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_of_a_chain_of_near_ties(dtype):
    """Neighbouring radii agree within rounding, the first and the last do not: all stay as they came."""
    step = {torch.float64: 0.5e-12, torch.float32: 0.4e-6}[dtype]
    direction = torch.nn.functional.normalize(torch.randn(3, 9, dtype=torch.float64), dim=0)
    radii = 1 + step * torch.randperm(9)
    pos = (radii * direction).repeat(1, 2) * torch.tensor([1.0, -1.0]).repeat_interleave(9)
    pos = torch.cat([pos, torch.zeros(3, 1), 2 * pos[:, [0, 9]]], 1)
    order = radial_order(pos.to(dtype), Sequences.dense(1, 21, None, torch.device("cpu")))
    # the shape of the cloud tells antipodes from others, not from each other
    assert order[0] == 18
    assert sorted(order[19:].tolist()) == [19, 20]
    assert all(order.tolist().index(k) < order.tolist().index(k + 9) for k in range(9))
    flat = torch.cat([pos[:, :18] / radii.repeat(2), pos[:, 18:]], 1) if dtype == torch.float64 else pos
    assert torch.equal(radial_order(flat.to(dtype), Sequences.dense(1, 21, None, torch.device("cpu"))), order)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_far_from_the_origin(dtype):
    """What rounding makes of positions there is no difference of radii."""
    pos = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=torch.float64).T
    pos = torch.cat([pos, 1.5 * pos], 1)
    far = {torch.float64: 1e6, torch.float32: 1e3}[dtype]
    sequences = Sequences.dense(1, 16, None, torch.device("cpu"))
    for _ in range(20):
        moved = (motion() @ pos + far * torch.randn(3, 1, dtype=torch.float64)).to(dtype)
        assert radial_order(moved, sequences).tolist() == list(range(16))


def test_nan_in_one_sequence_leaves_the_order_of_others():
    sizes = (5, 4, 7)
    pos = torch.randn(3, 16, dtype=torch.float64)
    sequences = Sequences.flat(16, batch_of(sizes), torch.device("cpu"))
    scalars = torch.randn(2, 16, dtype=torch.float64)
    expected = radial_order(pos, sequences, scalars)
    pos[:, 6], scalars[0, 7] = torch.nan, torch.inf
    order = radial_order(pos, sequences, scalars)
    check_order(order, sequences)
    assert torch.equal(order[:5], expected[:5])
    assert torch.equal(order[9:], expected[9:])


def test_orders_that_are_none():
    sequences = Sequences.flat(5, torch.tensor([0, 0, 0, 1, 1]), torch.device("cpu"))
    for order, message in [
        (torch.arange(5).int(), "order must be int64 with 5 entries"),
        (torch.arange(4), "order must be int64 with 5 entries"),
        (torch.tensor([0, 1, 1, 3, 4]), "order must be a permutation"),
        (torch.tensor([0, 1, 5, 3, 4]), "order must be a permutation"),
        (torch.tensor([0, 1, 3, 2, 4]), "order must be a permutation"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_order(order, sequences)
    padded = Sequences.dense(1, 5, torch.tensor([3]), torch.device("cpu"))
    with pytest.raises(ValueError, match="order must keep padding"):
        check_order(torch.tensor([0, 1, 3, 2, 4]), padded)


@pytest.mark.parametrize("step", [1, 3, 11, 20])
def test_token_blocks(step):
    x, y = (torch.randn(2, 11, dtype=torch.float64, requires_grad=True) for _ in range(2))
    calls = []

    def function(x, y):
        calls.append(x.shape[-1])
        return torch.cat([x * y, x.sin()])

    expected = function(x, y)
    out = token_blocks(function, step, (t for t in (x, y)))
    with torch.no_grad():
        without = token_blocks(function, step, (x, y))
    torch.testing.assert_close(without, expected, rtol=0, atol=0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    before = len(calls)
    grads = torch.autograd.grad(out.square().sum(), (x, y))
    assert (len(calls) > before) == (step < 11)
    assert max(calls[1:]) == min(step, 11)
    for got, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), (x, y)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_no_tokens():
    nothing = torch.empty(3, 0, dtype=torch.float64)
    for sequences in (
        Sequences.flat(0, torch.empty(0, dtype=torch.int64), torch.device("cpu")),
        Sequences.flat(0, torch.empty(0, dtype=torch.int64), torch.device("cpu"), 3),
        Sequences.flat(0, None, torch.device("cpu")),
        Sequences.dense(0, 5, None, torch.device("cpu")),
        Sequences.dense(3, 0, None, torch.device("cpu")),
        Sequences.dense(3, 0, torch.zeros(3, dtype=torch.int64), torch.device("cpu")),
    ):
        assert sequences.centred(nothing).shape == (3, 0)
        assert sequences.mean(nothing).shape == (3, sequences.count)
        assert not sequences.mean(nothing).any()
        assert sequences.mix(kernel, nothing, nothing).shape == (3, 0)
        assert radial_order(nothing, sequences).shape == (0,)


def test_bounds_too_small():
    with pytest.raises(ValueError, match="max_num_nodes must be at least 3"):
        Sequences.flat(5, torch.tensor([0, 0, 0, 1, 1]), torch.device("cpu"), 2, 2)


def test_compiling_needs_the_sizes(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    batch = torch.tensor([0, 0, 0, 1, 1])
    for options in ((), (2,), (None, 3)):
        with pytest.raises(ValueError, match="batch_size and max_num_nodes must be given"):
            Sequences.flat(5, batch, torch.device("cpu"), *options)


def test_error_sees_differences():
    """The measure that the tests of equivariance use."""
    x = torch.ones(3, 5)
    assert error((x, 2 * x), (x, 2 * x)) == 0
    assert error(x, 2 * x) == 0.5


def test_one_sequence_without_tokens():
    assert Sequences.flat(0, None, torch.device("cpu")).mean(torch.zeros(3, 0)).shape == (3, 0)
    assert Sequences.flat(0, None, torch.device("cpu"), 1).mean(torch.zeros(3, 0)).tolist() == [[0], [0], [0]]
