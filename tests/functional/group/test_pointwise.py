"""Group attention with the pointwise relation h = t: its tile functions, extreme scores, dropout, tiles, compiled."""

import pytest
import torch
from attention_operands import EXTREMES, Largest, as_full, assert_same, gradients, group_attention, operands
from small_groups import GROUPS

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional.group import pointwise, tiled_attention
from tg_equiattn.groups import cyclic

T, D, S, C, CV = 3, 5, 3, 2, 4
TABLE = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0]])  # of C3: no transposition, so that it is not its own inverse


def tile(pixels, full, masked, dropped):
    """Float64 operands of the tile functions, those with gradients first."""
    shapes = [(T, C, pixels), (D, S, C, pixels), (D, S, CV, pixels), (T, D, S if full else 1, pixels)]
    shapes += [] if full else [(T, S, pixels)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = torch.zeros(D, pixels, dtype=torch.float64)
    bias[1:] = torch.where(torch.rand(D - 1, pixels) < 0.3, -torch.inf, 0.0)
    keep = 2.0 * (torch.rand(D, T, S, pixels, dtype=torch.float64) < 0.5)
    return tensors, bias if masked else None, keep if dropped else None


def formula(query, key, value, position, group, bias, keep):
    u = [position[t][:, TABLE[t]] if group is None else position[t] + group[t, TABLE[t]] for t in range(T)]
    score = torch.einsum("tcp,dscp->tdsp", query, key) + torch.stack(u)
    score = score if bias is None else score + bias[:, None]
    weight = score.flatten(1, 2).softmax(1).view_as(score)
    weight = weight if keep is None else weight * keep.transpose(0, 1)
    return torch.einsum("tdsp,dscp->tcp", weight, value), score.flatten(1, 2).logsumexp(1)


@pytest.mark.parametrize("pixels", [1, 7])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("masked", "dropped"), [(False, False), (True, False), (True, True)])
def test_tile_functions(pixels, full, masked, dropped):
    tensors, bias, keep = tile(pixels, full, masked, dropped)
    given = tensors if not full else [*tensors, None]
    expected = formula(*given, bias, keep)
    grad = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, tensors, grad)
    with torch.no_grad():
        for a, b in zip(pointwise.forward(*given, TABLE[None], bias, keep), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        got = pointwise.backward(*given, TABLE[None], TABLE.argsort(-1)[None], bias, keep, *grad)
    assert (got[4] is None) == full
    for a, b in zip(got, wanted, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("form", [tuple, as_full])
def test_extreme_scores(form, extreme, device):
    index = relation_index(cyclic(2), "relative")
    exact, neighbourhood = extreme(torch.float64)
    single = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected = group_attention(*exact, index, neighbourhood=neighbourhood, backend="plain")
    out = group_attention(*form(single), index.to(device), neighbourhood=neighbourhood)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-3 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("form", [tuple, as_full])
@pytest.mark.parametrize("kernel_size", [3, None])
def test_dropout_is_that_of_the_plain_backend(form, kernel_size, device):
    tensors, neighbourhood = operands(4, (4, 5), kernel_size, device=device)
    index, outs = relation_index(GROUPS["D2"], "relative").to(device), []
    for backend in ("torch", "plain"):
        torch.manual_seed(3)
        options = {"neighbourhood": neighbourhood, "dropout": 0.4, "backend": backend}
        outs.append(group_attention(*form(tensors), index, **options))
    assert_same(*outs, tensors)


@pytest.mark.parametrize(("kernel_size", "spatial"), [(5, (34, 40)), (3, (5, 6, 7)), (7, (3, 4)), (None, (12, 12))])
def test_equals_the_plain_backend(kernel_size, spatial):
    """More than one tile (2^17 scores of a query element), volumes, windows larger than the image, global."""
    tensors, neighbourhood = operands(8, spatial, kernel_size, batch=1, heads=2, channels=3, value_channels=2)
    index = relation_index(cyclic(8), "relative")
    outs = [group_attention(*tensors, index, neighbourhood=neighbourhood, backend=b) for b in ("torch", "plain")]
    assert_same(*outs, tensors)


def test_no_tensor_holds_all_scores():
    tensors, _ = operands(8, (24, 24), 5, batch=2, heads=3, channels=3, value_channels=2, dtype=torch.float32)
    query, key, value, rho_space, rho_group = (x.detach() for x in tensors)
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    options = (
        rho_space,
        rho_group,
        relation_index(cyclic(8), "relative"),
        None,
        torch.tensor(0),
        5,
        (),
        False,
        0.0,
        "eager",
    )
    with Largest() as largest:
        out, level = tiled_attention.group_attention_op._init_fn(*flat, *options)
        tiled_attention.group_attention_backward_op._init_fn(out, level, *flat, *options)
    assert largest.count < 8**2 * 25 * 24 * 24 * len(flat[0]) / 8


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kernel_size", [3, None])
def test_compiled_equals_eager(kernel_size, full, dropout):
    tensors, _ = operands(4, (6, 7), kernel_size, dtype=torch.float32)
    index, outs = relation_index(cyclic(4), "relative"), []
    for path in ("compiled", "eager"):
        *features, rho_space, rho_group = as_full(tensors) if full else tensors
        flat = *(x.flatten(0, 1) for x in features), rho_space, rho_space.new_zeros(0) if full else rho_group
        settings = index, None, torch.tensor(5), kernel_size or 0, (), False, dropout, path
        outs.append(torch.cat([x.flatten() for x in tiled_attention.group_attention_op(*flat, *settings)]))
    assert_same(*outs, tensors, atol=1e-5)
