"""Frame attention as compilers for accelerators are given it: the operator's numbers, and what becomes of it."""

import pytest
import torch
from torch import nn

from tg_equiattn.encodings.group import relation_index
from tg_equiattn.functional import frame_attention
from tg_equiattn.functional.group import attention
from tg_equiattn.functional.group.frame_windows import frame_attention_op
from tg_equiattn.functional.group.fused_frames import fused_frame_attention
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic

FLOAT = 4
CASES = {
    "squares": (2, 4, 5, {}, 0.0, False),
    "lifting, masked": (2, 1, 3, {}, 0.0, True),
    "disks around a torus, dropout": (2, 4, 5, {"shape": "disk", "padding_mode": "circular"}, 0.3, False),
    "balls, masked, dropout": (3, 4, 5, {"shape": "disk"}, 0.3, True),
    "windows wider than the image": (2, 4, 9, {"shape": "disk"}, 0.0, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_operators_numbers(name):
    dim, elements, side, kind, dropout, masked = CASES[name]
    window, spatial = Neighbourhood(dim, side, **kind), (5, 7, 3)[:dim]
    shapes = [(2, 2, channels, elements, *spatial) for channels in (3, 3, 5)] + [(2, 4, window.count(), 4)]
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.rand(2, *spatial) < 0.7 if masked else None
    settings = mask, torch.tensor(11), side, window.selection, window.circular, dropout
    expected, got = (attend(*operands, *settings) for attend in (frame_attention_op, fused_frame_attention))
    there = torch.ones(2, *spatial) if mask is None else mask  # outputs of hidden queries are cut off
    grads = [torch.randn_like(x) * there.view(2, *[1] * (x.ndim - dim - 1), *spatial) for x in got]
    for a, b, shown in zip(got, expected, grads, strict=True):
        torch.testing.assert_close(a * (shown != 0), b * (shown != 0), rtol=0, atol=1e-12)
    of_fused, of_operator = (torch.autograd.grad(x, operands, grads) for x in (got, expected))
    torch.testing.assert_close(of_fused, of_operator, rtol=0, atol=1e-11)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", [("square", "mask"), ("disk", "mask"), ("disk", "circular")])
def test_pairs_of_elements(full, kind, monkeypatch):
    """Relation "relative" as it is compiled, a third of the image hidden: outputs, levels and gradients."""
    monkeypatch.setattr(attention, "compiler_fuses", lambda *_: True)
    window, mask, c4 = Neighbourhood(2, 5, *kind), torch.rand(2, 5, 7) < 0.7, cyclic(4)
    shapes = [(2, 2, channels, 4, 5, 7) for channels in (3, 3, 5)]
    shapes += [(4, window.count(), 4, 3)] if full else [(4, window.count(), 3), (4, 3)]
    shapes += [(2, 4, window.count()), (2, 4)]
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    index = relation_index(c4, "relative")

    def attend(*operands):
        qkv, rho, biases = operands[:3], (*operands[3:-2], None)[:2], operands[-2:]
        return attention.checked_group_attention(*qkv, *rho, index, window, *biases, 0.0, mask)

    expected = attend(*operands)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    got = attend(*operands)
    there = mask[:, None, None].expand_as(expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1] * there, expected[1] * there, rtol=0, atol=1e-12)
    grads = [torch.randn_like(expected[0]), torch.randn_like(expected[1]) * there]
    of_fused, of_operator = (torch.autograd.grad(x, operands, grads) for x in (got, expected))
    torch.testing.assert_close(of_fused, of_operator, rtol=0, atol=1e-11)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.window = Neighbourhood(2, 5)
        self.rho, self.bias = nn.Parameter(torch.randn(8, 25, 4)), nn.Parameter(torch.randn(2, 8, 25))

    def forward(self, query, key, value):
        return frame_attention(query, key, value, self.rho, neighbourhood=self.window, space_bias=self.bias)


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
