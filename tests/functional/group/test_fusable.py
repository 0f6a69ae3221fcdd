"""The form of windowed attention that compilers fuse gives the operator's numbers."""

import pytest
import torch
from attention_operands import RELATIONS, table_operands

from tg_equiattn.functional.group.fusable import windowed_attention_fusable
from tg_equiattn.functional.group.operator import windowed_attention
from tg_equiattn.grids import Window
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention

WINDOWS = {
    "square": {},
    "disk": {"shape": "disk"},
    "circular": {"shape": "disk", "padding_mode": "circular"},
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", WINDOWS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_the_operators_numbers(relation, shape, masked, dropout):
    """Outputs, log-sum-exps and gradients, of images and with windows wider than the image."""
    for spatial, side in (((5, 7), 5), ((2, 5, 3), 3)):
        window = Window(len(spatial), side, **WINDOWS[shape])
        operands, index = table_operands(relation, window, spatial)
        mask = torch.rand(2, *spatial) < 0.7 if masked else None
        settings = index, mask, torch.tensor(11), side, window.selection, window.circular, dropout
        expected, got = (f(*operands, *settings) for f in (windowed_attention, windowed_attention_fusable))
        shown = torch.ones(2, *spatial) if mask is None else mask  # outputs of masked queries are cut off
        grads = [torch.randn_like(x) * shown.view(2, *[1] * (x.ndim - len(spatial) - 1), *spatial) for x in got]
        for a, b, g in zip(got, expected, grads, strict=True):
            torch.testing.assert_close(a * (g != 0), b * (g != 0), rtol=0, atol=1e-12)
        operands = [x for x in operands if x.numel()]
        of_fusable, of_operator = (torch.autograd.grad(x, operands, grads) for x in (got, expected))
        torch.testing.assert_close(of_fusable, of_operator, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("side", "recorded", "operators"), [(16, True, 0), (64, False, 0), (64, True, 1)])
def test_scores_of_a_backward_pass_fit_in_memory(side, recorded, operators):
    """On accelerators compilers get the fusable form, but where its backward would keep tens of GiB of scores."""
    layer = GroupAttention(cyclic(8), 32, 32, heads=8, kernel_size=5, relation="relative").to("meta")
    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.set_grad_enabled(recorded):
        torch.compile(layer, backend=backend, fullgraph=True)(torch.empty(32, 32, 8, side, side, device="meta"))
    assert names.count("tg_equiattn.group_attention.default") == operators
