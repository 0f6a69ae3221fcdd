"""SE(3)-Hyena in all its variants, for the tests of it."""

from clouds import EDGE

from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator

LOCAL = {"local_context": True, "edge_channels": EDGE}
SMALL = {"hidden_scalars": 5, "hidden_vectors": 7}
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
