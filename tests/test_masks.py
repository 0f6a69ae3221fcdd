"""Every layer and function that takes a mask or lengths: an image or a graph without a valid pixel or node."""

import pytest
import torch
from cases import CASES, is_floating, run

NAMES = [name for name in CASES if "masked" in name] + [
    "SE3HyenaOperator", "VectorSelfAttention",
    "EwaldAttention",
]  # fmt: skip
OF_NODES = {"x", "context", "query", "key", "value", "q", "k", "scalars", "vectors", "pos"}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_valid(name):
    """Outputs and gradients are zero there, NaN has no effect, and others are as in a batch without it."""
    module, inputs = CASES[name].build(torch.float64)
    module.eval()
    nodes = [n for n in inputs if n in OF_NODES and isinstance(inputs[n], torch.Tensor)]
    valid = inputs.keys() & {"mask", "context_mask", "lengths"}
    for n in valid:
        inputs[n] = inputs[n].expand(len(inputs[nodes[0]]), *inputs[n].shape[1:]).clone()
        inputs[n][0] = 0
    for n in nodes:
        inputs[n][0] = torch.nan
    outs, grads = run(module, inputs)
    assert not any(out[0].any() for out in outs if out.numel())
    assert all(bool(x.isfinite().all()) for x in (*outs, *grads) if x is not None)
    of_inputs = dict(zip([n for n, x in inputs.items() if is_floating(x)], grads, strict=False))  # before parameters
    assert not any(of_inputs[n][0].any() for n in nodes if of_inputs[n] is not None)
    alone, _ = run(module, {n: x[1:] if n in (*nodes, *valid) else x for n, x in inputs.items()})
    for out, other in zip(outs, alone, strict=True):
        torch.testing.assert_close(out[1:], other, rtol=0, atol=1e-12)
