"""Operators and models on tokens by name: SE(3)-Hyena in all its variants, and vector self-attention."""

import pytest
import torch
from cases import LOCAL, SMALL
from clouds import S, V

from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator, VectorSelfAttention

OPTIONS = {
    "plain": (SE3HyenaOperator, {}),
    "causal": (SE3HyenaOperator, {"causal": True}),
    "widths": (SE3HyenaOperator, {"out_scalars": 1, "out_vectors": 5, **SMALL}),
    "vectors": (SE3HyenaOperator, {"out_scalars": 0, "hidden_scalars": 0}),
    "short causal": (SE3HyenaOperator, {"short_conv": 5, "causal": True}),
    "implicit": (SE3HyenaOperator, {"filter": "implicit", "short_conv": 3}),
    "implicit causal": (SE3HyenaOperator, {"filter": "implicit", "causal": True, "hidden_scalars": 0}),
    "implicit causal model": (
        SE3Hyena,
        {"num_layers": 1, "attn_kwargs": {"filter": "implicit", "causal": True, "short_conv": 3}, **SMALL},
    ),
    "implicit as published": (SE3HyenaOperator, {"filter": "implicit", "mixed_products": False}),
    "exponential causal": (SE3HyenaOperator, {"filter": "exponential", "causal": True, "short_conv": 3}),
    "local": (SE3HyenaOperator, LOCAL),
    "local bare": (SE3HyenaOperator, {"local_context": True}),
    "radial": (SE3HyenaOperator, {"order": "radial"}),
    "model": (SE3Hyena, {"num_layers": 2, "num_blocks": 2, **SMALL}),
    "pooled": (
        SE3Hyena,
        {"out_scalars": 1, "out_vectors": 2, "num_layers": 1, "pool": "mean", **SMALL},
    ),
    "radial local": (SE3Hyena, {"num_layers": 1, "order": "radial", "attn_kwargs": LOCAL, **SMALL}),
}
MORE = {
    "exponential": (SE3HyenaOperator, {"filter": "exponential"}),
    "exponential causal model": (
        SE3Hyena,
        {"num_layers": 2, "attn_kwargs": {"filter": "exponential", "causal": True, "short_conv": 5}, **SMALL},
    ),
    "implicit wide": (SE3HyenaOperator, {"filter": "implicit", "short_conv": 5}),
    "implicit model": (SE3Hyena, {"num_layers": 2, "attn_kwargs": {"filter": "implicit", "short_conv": 3}, **SMALL}),
    "implicit bare": (SE3HyenaOperator, {"filter": "implicit"}),
}  # of which one thing is tested
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
