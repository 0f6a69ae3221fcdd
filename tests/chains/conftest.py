"""Operators and models on tokens by name: SE(3)-Hyena in all its variants, and vector self-attention."""

import pytest
import torch
from clouds import S, V
from hyena_layers import LOCAL, MORE, OPTIONS, SMALL

from tg_equiattn.nn import SE3Hyena, VectorSelfAttention

ATTENTION = {
    "attention": (VectorSelfAttention, {}),
    "attention, widths": (VectorSelfAttention, {"out_scalars": 1, "out_vectors": 5, **SMALL}),
    "attention, local": (VectorSelfAttention, LOCAL),
    "attention, short": (VectorSelfAttention, {"short_conv": 3}),
    "attention, model": (SE3Hyena, {"attention": True, "num_layers": 2, "num_blocks": 2, **SMALL}),
    "attention, pooled local": (
        SE3Hyena,
        {"attention": True, "out_scalars": 0, "num_layers": 1, "pool": "mean", "attn_kwargs": LOCAL, **SMALL},
    ),
}  # fmt: skip


@pytest.fixture(params=[*OPTIONS, *ATTENTION])
def name(request):
    return request.param


@pytest.fixture
def make(randomise):
    def make(name, dtype=torch.float64, std=0.7, **more):
        kind, options = (OPTIONS | MORE | ATTENTION)[name]
        return randomise(kind(S, V, **options | more), std).to(dtype)

    return make
