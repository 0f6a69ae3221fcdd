"""Second derivatives of group attention, and its plain composition, which transforms go through."""

import pytest
import torch
from attention_operands import EXTREMES, gradients, group_attention, operands

from tg_equiattn.grids import Window
from tg_equiattn.group.encodings import relation_index
from tg_equiattn.group.heads import Terms, attention_by_position
from tg_equiattn.groups import cyclic

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")


def twice(out, tensors):
    first = torch.autograd.grad((out * out).sum(), tensors, create_graph=True)
    return gradients(torch.cat([g.flatten() for g in first]), tensors)


def close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.to(b), b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_scores_stay_finite(extreme):
    exact, window = extreme(torch.float64)
    index = relation_index(cyclic(2), "ge_vit")

    def second(tensors, backend):
        return twice(group_attention(*tensors, index, window=window, backend=backend), tensors)

    expected = second(exact, "plain")
    close(second(exact, "torch"), expected, 1e-9)
    close(second([x.detach().float().requires_grad_() for x in exact], "torch"), expected, 1e-2)


def test_third_derivatives():
    tensors, window = operands(2, (3, 3), batch=1, heads=2, channels=2, value_channels=1)
    index, out = relation_index(cyclic(2), "ge_vit"), []
    for backend in ("torch", "plain"):
        y = group_attention(*tensors, index, window=window, backend=backend)
        for _ in range(2):
            y = sum((g * torch.cos(g)).sum() for g in torch.autograd.grad(y.square().sum(), tensors, create_graph=True))
        out.append(gradients(y, tensors))
    close(*out, 1e-10)


@pytest.mark.parametrize("padding_mode", ["mask", "circular"])
@pytest.mark.parametrize(("spatial", "side"), [((3, 5), 3), ((2, 5), (5, 3)), ((2, 3, 2), 3)])
def test_heads_without_content(spatial, side, padding_mode):
    """Derivatives of first and second order, and gradients of a batch of losses."""
    window = Window(len(spatial), side, "disk" if spatial == (3, 5) else "square", padding_mode)
    value = torch.randn(2, 2, 3, 2, *spatial, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 2, window.count(), dtype=torch.float64, requires_grad=True)

    def attend(value, bias):
        return attention_by_position(value, Terms(None, space_bias=bias), window)

    assert torch.autograd.gradcheck(attend, (value, bias), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(attend, (value, bias))
