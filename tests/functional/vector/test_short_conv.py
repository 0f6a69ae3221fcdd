"""Short convolutions along sequences against loops over tokens and taps."""

import pytest
import torch
from clouds import close, gradients
from oracles import taps
from space import error, motion, move

from tg_equiattn.functional.vector import short_conv as kernels
from tg_equiattn.testing import TOLERANCE

B, C = 3, 2
SIZES = 7, 0, 2
MODES = ("linear", "causal")


def short_conv(x, weight, lengths=None, mode="linear"):
    """Of scalars (B, N, C) or vectors (B, N, C, 3) with weights (C, K)."""
    weight = weight.repeat_interleave(x.shape[2:].numel() // len(weight), 0).T
    return kernels.short_conv(x.flatten(2), weight, lengths, mode == "causal").view(x.shape)


def inputs(vectors, n=7, k=3, dtype=torch.float64):
    x = torch.randn(B, n, C, *[3] * vectors, dtype=dtype)
    return x.requires_grad_(), torch.randn(C, k, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("k", [1, 3, 9])  # 9 reach beyond both ends
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectors", [False, True])
def test_equals_the_definition(vectors, mode, k, ragged, device):
    """NaN beyond the own lengths is never read; outputs there are zero."""
    x, weight = inputs(vectors, k=k)
    own = SIZES if ragged else (7,) * B
    wanted = torch.stack(
        [torch.cat([taps(x[b, :n], weight, mode == "causal"), torch.zeros_like(x[b, n:])]) for b, n in enumerate(own)]
    )
    there = (torch.arange(7) < torch.tensor(own)[:, None]).view(B, 7, *[1] * (x.ndim - 2))
    holes = torch.where(there, x.detach(), torch.nan).requires_grad_()
    lengths = torch.tensor(own, device=device) if ragged else None
    out = short_conv(holes.to(device), weight.to(device), lengths, mode).cpu()
    close([out, *gradients([out], (holes, weight))], [wanted, *gradients([wanted], (x, weight))])


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_turn(dtype, reflect, device):
    x, weight = (t.detach().to(device) for t in inputs(True, 31, dtype=dtype))
    r = motion(dtype, reflect, device)
    assert error(short_conv(move(x, r), weight), move(short_conv(x, weight), r)) <= TOLERANCE[dtype]
    assert error(short_conv(x[..., [1, 0, 2]], weight), short_conv(x, weight)) > 1e-2


def test_causal_sees_no_later_token():
    x, weight = (t.detach() for t in inputs(True))
    changed = x.clone()
    changed[:, 4:] = 7
    for mode, first in (("causal", 4), ("linear", 3)):
        differs = (short_conv(changed, weight, mode=mode) - short_conv(x, weight, mode=mode)).abs().amax((0, 2, 3))
        assert not differs[:first].any()
        assert differs[first] > 1e-2
