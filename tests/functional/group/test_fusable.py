"""Attention as compilers for accelerators are given it: the operator's numbers, and what becomes of it."""

import pytest
import torch
from attention_operands import RELATIONS, table_operands
from torch import nn

from tg_equiattn.functional import frame_attention
from tg_equiattn.functional.group.fusable import windowed_attention_fusable
from tg_equiattn.functional.group.operator import windowed_attention
from tg_equiattn.grids import Window

FLOAT = 4
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


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.window = Window(2, 5)
        self.rho, self.bias = nn.Parameter(torch.randn(8, 25, 4)), nn.Parameter(torch.randn(2, 8, 25))

    def forward(self, query, key, value):
        return frame_attention(query, key, value, self.rho, window=self.window, space_bias=self.bias)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # tracing on the device meta warns
def test_what_a_compiler_makes_of_it_for_gpus(tmp_path):
    """Few kernels, scores in registers forward; no binary spills, and an eighth of the threads are live."""
    pytest.importorskip("triton")
    from building import TARGETS, build, kernels
    from compiling import compiled

    operands = {name: torch.randn(2, 2, 4, 8, 32, 32, device="meta") for name in ("query", "key", "value")}
    numbers = operands["query"].numel()
    forward, training = compiled(Attend(), operands)
    (one,) = forward
    assert one.kernels <= 3
    assert one.bytes < 2 * 25 / 4 * FLOAT * numbers  # two tensors of scores; in training eight
    assert sum(graph.launches()[0] for graph in training) <= 20
    assert sum(graph.launches()[1] for graph in training) < 8 * 25 / 4 * FLOAT * numbers
    for graph in (one, training[-1]):
        fused = {name: source for name, source in kernels(graph.code).items() if "'r0_': 32}" in source}
        assert fused
        for name, source in fused.items():
            for target in TARGETS.values():
                built = build(name, source, target, tmp_path, block=32, warps=8)
                assert built.spilled == 0
                assert built.occupancy(8) >= 0.125
