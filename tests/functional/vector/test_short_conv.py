"""Short convolutions along sequences against loops over tokens and taps."""

import pytest
import torch
from clouds import close, gradients
from oracles import beyond, taps

from tg_equiattn.functional.vector import short_conv as kernels

B, C = 3, 2
SIZES = 7, 0, 2
MODES = ("linear", "causal")


def short_conv(x, weight, lengths=None, mode="linear"):
    """Of scalars (B, N, C) or vectors (B, N, C, 3) with weights (C, K)."""
    weight = weight.repeat_interleave(x.shape[2:].numel() // len(weight), 0).T
    return kernels.short_conv(x.flatten(2), weight, lengths, mode == "causal").view(x.shape)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("k", [1, 3, 9])  # 9 reach beyond both ends
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectors", [False, True])
def test_equals_the_definition(vectors, mode, k, ragged, device):
    """NaN beyond the own lengths is never read; outputs there are zero."""
    shapes = (B, 7, C, *[3] * vectors), (C, k)
    x, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    own = SIZES if ragged else (7,) * B
    wanted = torch.stack(
        [torch.cat([taps(x[b, :n], weight, mode == "causal"), torch.zeros_like(x[b, n:])]) for b, n in enumerate(own)]
    )
    lengths, holes = torch.tensor(own, device=device) if ragged else None, beyond(x, own)
    out = short_conv(holes.to(device), weight.to(device), lengths, mode).cpu()
    close([out, *gradients([out], (holes, weight))], [wanted, *gradients([wanted], (x, weight))])
