"""Registered operators by torch's own check of schemas, fakes and dispatch; and what functions save for backward."""

import pytest
import torch
from attention_operands import table_operands
from torch.library import opcheck

from tg_equiattn.chains.long_conv import lag_convolution, long_convolution
from tg_equiattn.graphs.edge_products import csr_edge_dot, csr_edge_sum
from tg_equiattn.grids import PixelGrid, Window
from tg_equiattn.group.windows import flat_operands
from tg_equiattn.nn import PerformerAttention

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

NEAR = PixelGrid((3, 4), 2).neighbors().csr


def d(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def group_attention_operands(relation):
    tensors, index = table_operands(relation, Window(2, 3), (3, 4), 2)
    mask = torch.tensor([[[True, False, True, True]] * 3]).expand(2, -1, -1).contiguous()
    operands = *flat_operands(*tensors, index, mask, None, Window(2, 3)), 0.0, 1 << 19
    return [x.detach().requires_grad_() if n < 5 else x for n, x in enumerate(operands)]


OPERATORS = {
    "frame attention": (torch.ops.tg_equiattn.group_attention.default, lambda: group_attention_operands("frame")),
    "relative attention": (torch.ops.tg_equiattn.group_attention.default, lambda: group_attention_operands("relative")),
    "ge_vit attention": (torch.ops.tg_equiattn.group_attention.default, lambda: group_attention_operands("ge_vit")),
    "vector attention": (
        torch.ops.tg_equiattn.vector_attention.default,
        lambda: (d(2, 5, 6), d(2, 5, 6), d(2, 5, 9), torch.randn(2, 1, 5, dtype=torch.float64)),
    ),
    "edge dot": (csr_edge_dot, lambda: (d(2, 12, 3), d(2, 12, 3), *NEAR)),
    "edge sum": (csr_edge_sum, lambda: (d(2, len(NEAR.col)), d(2, 12, 3), *NEAR)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_the_check_of_torch(name):
    operator, operands = OPERATORS[name]
    opcheck(operator, operands())


FEATURES = {"position": None, "key_channels": 8, "num_random_features": 50, "method": "features"}


@pytest.mark.parametrize(
    ("function", "shapes", "measure"),
    [
        (PerformerAttention(16, 16, 2, **FEATURES), [(999, 16)], max),  # no node's features
        (lambda a, b: long_convolution(a, b, 0, None, "circular"), [(9, 2, 997)] * 2, sum),
        (lambda x, h: lag_convolution(x, h), [(3, 2, 3, 997), (2, 1993)], max),  # no spectrum
    ],
)
def test_no_more_than_inputs_is_saved(function, shapes, measure):
    """No tensor larger than an input; of convolutions of two sequences, no more than the inputs in all."""
    saved, inputs = [], [torch.randn(shape, requires_grad=True) for shape in shapes]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        function(*inputs)
    assert measure(saved) <= measure(x.numel() for x in inputs)
