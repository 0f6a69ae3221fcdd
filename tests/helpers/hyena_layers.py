"""SE(3)-Hyena in all its variants, for the tests of it."""

from clouds import EDGE

from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator

LOCAL = {"local_context": True, "edge_channels": EDGE}
SMALL = {"hidden_scalars": 5, "hidden_vectors": 7, "gate_channels": 3}
OPTIONS = {
    "plain": (SE3HyenaOperator, {}),
    "causal": (SE3HyenaOperator, {"mode": "causal", "num_blocks": 2}),
    "widths": (SE3HyenaOperator, {"out_scalars": 1, "out_vectors": 5, "mlp_channels": 3, **SMALL}),
    "vectors": (SE3HyenaOperator, {"out_scalars": 0, "hidden_scalars": 0}),
    "short": (SE3HyenaOperator, {"short_conv": 5, "mode": "causal"}),
    "lag": (SE3HyenaOperator, {"filter": "lag", "short_conv": 3}),
    "lag causal": (SE3HyenaOperator, {"filter": "lag", "mode": "causal", "hidden_scalars": 0}),
    "lag model": (SE3Hyena, {"depth": 1, "filter": "lag", "mode": "causal", "short_conv": 3, **SMALL}),
    "local": (SE3HyenaOperator, {**LOCAL, "mlp_channels": 5}),
    "local bare": (SE3HyenaOperator, {"local_context": True}),
    "radial": (SE3HyenaOperator, {"order": "radial"}),
    "model": (SE3Hyena, {"depth": 2, **SMALL}),
    "pooled": (SE3Hyena, {"out_scalars": 1, "out_vectors": 2, "depth": 1, "pool": "mean", "mode": "causal", **SMALL}),
    "radial local": (SE3Hyena, {"depth": 1, "order": "radial", **LOCAL, **SMALL}),
}
MORE = {
    "published": (SE3HyenaOperator, {"norm": "forward"}),
    "lag wide": (SE3HyenaOperator, {"filter": "lag", "short_conv": 5}),
    "lag bare": (SE3HyenaOperator, {"filter": "lag"}),
}  # of which one thing is tested
