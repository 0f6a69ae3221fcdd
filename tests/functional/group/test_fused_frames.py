"""Frame attention as compilers for accelerators are given it: the operator's numbers."""

import pytest
import torch

from tg_equiattn.functional.group.frame_windows import frame_attention_op
from tg_equiattn.functional.group.fused_frames import fused_frame_attention
from tg_equiattn.grids import Neighbourhood

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
    for a, b in zip(of_fused, of_operator, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
