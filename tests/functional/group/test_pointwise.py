"""Group attention with the pointwise relation h = t: its tile functions, tiles, compiled."""

import pytest
import torch
from attention_operands import as_full, assert_same, group_attention, operands

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
    given = [*tensors, None] if full else tensors
    expected = formula(*given, bias, keep)
    grad = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, tensors, grad)
    with torch.no_grad():
        torch.testing.assert_close(pointwise.forward(*given, TABLE[None], bias, keep), expected, rtol=0, atol=1e-13)
        got = pointwise.backward(*given, TABLE[None], TABLE.argsort(-1)[None], bias, keep, *grad)
    assert (got[4] is None) == full
    torch.testing.assert_close(got[: len(wanted)], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel_size", "spatial"), [(5, (34, 40)), (3, (5, 6, 7)), (None, (12, 12))])
def test_equals_the_plain_backend(kernel_size, spatial):
    """More than one tile (2^17 scores of a query element), of images and volumes, local and global."""
    tensors, neighbourhood = operands(8, spatial, kernel_size, batch=1, heads=2, channels=3, value_channels=2)
    index = relation_index(cyclic(8), "relative")
    outs = [group_attention(*tensors, index, neighbourhood=neighbourhood, backend=b) for b in ("torch", "plain")]
    assert_same(*outs, tensors)


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
