"""Weights of relations that sum over t as products of three factors: equal to those of scores, however large."""

import pytest
import torch
from attention_operands import table_operands

from tg_equiattn.functional.group.definition import windowed_attention_definition
from tg_equiattn.functional.group.flat_operands import FlatOperands
from tg_equiattn.functional.group.operator import windowed_attention
from tg_equiattn.functional.group.three_factors import has_three_factors, three_factor_weights
from tg_equiattn.grids import Window


def outputs(function, tensors, settings):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*tensors, *settings)
    valid = settings[1][:, None, None, None]
    out, lse = (torch.where(valid, x, 0.0) for x in (out, lse))
    return [out, lse, *torch.autograd.grad(out.cos().sum() + (lse / lse.abs().amax()).sum(), tensors)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("relation", ["ge_vit", "lifted", "gsa"])
def test_equal_to_the_definition(relation, scale, dtype, tolerance):
    """Scores of thousands too, where products of factors vanish and scores are formed instead."""
    torch.manual_seed(3)
    tensors, index = table_operands(relation, Window(2, 3), (5, 4))
    tensors[0] = tensors[0] * scale
    settings = index, torch.rand(2, 5, 4) < 0.7, torch.tensor(0), 3, (), False, 0.0
    expected = outputs(windowed_attention_definition, tensors, settings)
    found = outputs(windowed_attention, [x.to(dtype) for x in tensors], settings)
    for a, b in zip(found, expected, strict=True):
        size = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * size * max(1.0, scale / 30))


def weights(scale):
    """Weights of three factors for queries times ``scale``."""
    torch.manual_seed(3)
    tensors, index = table_operands("ge_vit", Window(2, 3), (5, 4))
    tensors[0] = tensors[0] * scale
    x = FlatOperands(*(y.detach() for y in tensors), index, None, torch.tensor(0), 3, (), True, 0.0)
    query, key = tensors[0].detach(), tensors[1].detach()
    one = x.flat(torch.cat([query, torch.ones_like(query[:, :, :1])], 2).transpose(2, 3)).transpose(2, 3)
    of_t = x.elements.of_query(one, 1)
    keys, tables = x.elements.of_keys(x.padded(key)), (x.offset_table, x.element_table)
    return three_factor_weights(x, 1, of_t[:, :, :-1], of_t.transpose(2, 3).flatten(4), keys, *tables, None)


def test_the_fall_back_is_needed():
    """Negative control: at scores of thousands the sum of products is too small to divide by."""
    weight, share, _ = weights(1.0)
    total = (weight * share).sum((3, 4))
    torch.testing.assert_close(total, torch.ones_like(total))
    assert weights(1000.0) is None


@pytest.mark.parametrize(
    ("relation", "expected"),
    [("ge_vit", True), ("lifted", True), ("relative", False), ("frame", False)],
)
def test_relations_with_three_factors(relation, expected):
    tensors, index = table_operands(relation, Window(2, 3), (5, 4))
    x = FlatOperands(*tensors, index, None, torch.tensor(0), 3, (), False, 0.0)
    assert has_three_factors(x) == expected
