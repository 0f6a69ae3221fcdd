"""Group attention of heads: scores of +-200, higher derivatives, dropout, half precision, heads without content."""

import math

import pytest
import torch
from attention_operands import EXTREMES, group_attention, operands

from tg_equiattn.group.encodings import relation_index
from tg_equiattn.groups import cyclic


def derivatives(out, tensors, order):
    """The output and its derivatives up to an order, each along a direction of the one before."""
    found, last = [out], [out * out]
    for _ in range(order):
        total = sum((x * torch.cos(torch.arange(x.numel()).to(x)).view_as(x)).sum() for x in last)
        last = torch.autograd.grad(total, tensors, create_graph=True)
        found += last
    return found


@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_scores(extreme, relation, device):
    """Outputs, and derivatives of first and second order, by the operator in both precisions."""
    index = relation_index(cyclic(2), relation)
    exact, window = extreme(torch.float64)
    expected = derivatives(group_attention(*exact, index, window=window, backend="plain"), exact, 2)
    for dtype, *tolerances in ((torch.float64, 1e-9, 1e-9), (torch.float32, 2e-3, 1e-2)):
        tensors = [x.detach().to(device, dtype).requires_grad_() for x in exact]
        found = derivatives(group_attention(*tensors, index.to(device), window=window), tensors, 2)
        for n, (a, b) in enumerate(zip(found, expected, strict=True)):
            allowed = tolerances[n > len(exact)] * max(1.0, float(b.detach().abs().max()))
            torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=allowed)


def test_third_derivatives():
    """By the operator and by the definition."""
    tensors, window = operands(2, (3, 3), batch=1, heads=2, channels=2, value_channels=1)
    index = relation_index(cyclic(2), "ge_vit")
    found, expected = (
        derivatives(group_attention(*tensors, index, window=window, backend=backend), tensors, 3)
        for backend in ("torch", "plain")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * max(1.0, float(b.detach().abs().max())))


def test_dropout_is_unbiased_and_seeded():
    tensors, window = operands(2, (3, 4), batch=1, heads=1)
    index, count = relation_index(cyclic(2), "ge_vit"), 400

    def draws(number):
        torch.manual_seed(0)
        with torch.no_grad():
            return torch.stack([group_attention(*tensors, index, window=window, dropout=0.4) for _ in range(number)])

    every, expected = draws(count), group_attention(*tensors, index, window=window).detach()
    assert torch.equal(draws(1)[0], every[0])
    deviation = (every.mean(0) - expected).abs() / (every.std(0) / math.sqrt(count))
    assert every.std(0).min() > 0
    assert deviation.max() < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands(dtype, device):
    tensors, window = operands(3, (5, 6), dtype=torch.float32, device=device)
    index = relation_index(cyclic(3), "ge_vit").to(device)
    out = group_attention(*(x.detach().to(dtype) for x in tensors), index, window=window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), group_attention(*tensors, index, window=window), rtol=0, atol=0.15)
