"""Short convolutions along sequences against loops over tokens and taps."""

import pytest
import torch
from clouds import close, gradients
from oracles import beyond, taps

from tg_equiattn.nn.vector.sequences import Sequences
from tg_equiattn.nn.vector.short_conv import ShortConv
from tg_equiattn.node_batch import NodeBatch

B, N, C = 3, 7, 2
SIZES = 7, 0, 2


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("k", [3, 9])  # 9 reach beyond both ends
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("vectors", [False, True])
def test_equals_the_definition(vectors, causal, k, ragged, device):
    """NaN beyond the own lengths is never read."""
    components = 3 if vectors else 1
    layer = ShortConv([c for c in range(C) for _ in range(components)], k, causal).double()
    x = torch.randn(B, N, C, *[3] * vectors, dtype=torch.float64).requires_grad_()
    own = SIZES if ragged else (N,) * B
    wanted = torch.cat([taps(x[b, :n], layer.weight, causal) for b, n in enumerate(own)])
    expected = [wanted, *gradients([wanted], (x, layer.weight))]
    lengths, holes = torch.tensor(own, device=device) if ragged else None, beyond(x, own)
    sequences = Sequences(NodeBatch.dense(B, N, lengths, torch.device(device)))
    out = layer.to(device)(holes.flatten(0, 1).flatten(1).to(device), sequences).cpu().view(x.shape)
    out = torch.cat([out[b, :n] for b, n in enumerate(own)])
    close([out, *(g.cpu() for g in gradients([out], (holes, layer.weight)))], expected)
