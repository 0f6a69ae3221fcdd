"""Second derivatives of group attention, and its plain composition, which transforms go through."""

import pytest
import torch
from attention_operands import EXTREMES, assert_same, gradients, group_attention, operands

from tg_equiattn.encodings import relation_index
from tg_equiattn.groups import cyclic

SMALL = {"batch": 1, "heads": 2, "channels": 2, "value_channels": 1}


def twice(out, tensors):
    """Gradients of a function of the gradients."""
    first = torch.autograd.grad((out * out).sum(), tensors, create_graph=True)
    return gradients(torch.cat([g.flatten() for g in first]), tensors)


@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
@pytest.mark.parametrize("spatial", [(11, 12), (4, 3, 5)])
def test_plain_equals_the_operator(relation, spatial, device):
    """In many tiles, twice differentiated."""
    tensors, neighbourhood = operands(4, spatial, device=device)
    index = relation_index(cyclic(4), relation).to(device)

    def attend(backend):
        return group_attention(*tensors, index, neighbourhood=neighbourhood, backend=backend)

    assert_same(attend("plain"), attend("torch"), tensors)
    for a, b in zip(twice(attend("plain"), tensors), twice(attend("torch"), tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_scores_stay_finite(extreme):
    exact, neighbourhood = extreme(torch.float64)
    index = relation_index(cyclic(2), "ge_vit")

    def second(tensors, backend):
        return twice(group_attention(*tensors, index, neighbourhood=neighbourhood, backend=backend), tensors)

    expected = second(exact, "plain")
    single = second([x.detach().float().requires_grad_() for x in exact], "torch")
    for a, b, c in zip(second(exact, "torch"), single, expected, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-9 * max(1.0, float(c.abs().max())))
        torch.testing.assert_close(b.double(), c, rtol=0, atol=1e-2 * max(1.0, float(c.abs().max())))


def test_third_derivatives():
    tensors, neighbourhood = operands(2, (3, 3), **SMALL)
    index = relation_index(cyclic(2), "ge_vit")
    out = []
    for backend in ("torch", "plain"):
        y = group_attention(*tensors, index, neighbourhood=neighbourhood, backend=backend)
        for _ in range(2):
            y = sum((g * torch.cos(g)).sum() for g in torch.autograd.grad(y.square().sum(), tensors, create_graph=True))
        out.append(gradients(y, tensors))
    for a, b in zip(*out, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("backend", ["torch", "plain"])
def test_no_images_have_no_second_derivative(backend):
    tensors, neighbourhood = operands(2, (3, 3), batch=1)
    empty = [x.detach()[:0].requires_grad_() for x in tensors[:3]]
    x = [*empty, *tensors[3:]]
    out = group_attention(*x, relation_index(cyclic(2), "ge_vit"), neighbourhood=neighbourhood, backend=backend)
    assert out.shape == (0, 3, 7, 2, 3, 3)
    first = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert not any(g.any() for g in first)
    total = sum(g.square().sum() for g in first)
    second = torch.autograd.grad(total, x, allow_unused=True) if total.requires_grad else ()
    assert all(g is None or not g.any() for g in second)
