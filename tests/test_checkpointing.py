"""Activation checkpointing of every public module, by both of torch's ways, gives the gradients of a plain call."""

import pytest
import torch
from cases import CASES, ONE_A_NAME, agree
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

both_ways = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])


def gradients(module, inputs, **way):
    """Outputs of a module, and gradients of its floating point inputs and parameters after ``backward``."""
    module.zero_grad()
    given = {n: x.detach().requires_grad_() if _floating(x) else x for n, x in inputs.items()}

    def run(*values):
        return module(**dict(zip(given, values, strict=True)))

    found = checkpoint(run, *given.values(), **way) if way else run(*given.values())
    out = [x for x in tree_leaves(found) if _floating(x)]
    sum((x * torch.cos(torch.arange(x.numel()).to(x)).view_as(x)).sum() for x in out).backward()
    leaves = [*filter(_floating, given.values()), *module.parameters()]
    return out, [None if x.grad is None else x.grad.clone() for x in leaves]


def _floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@both_ways
@pytest.mark.parametrize("name", [name for name in ONE_A_NAME if name != "RandomFeatures"])  # no inputs
def test_modules(name, reentrant):
    pytest.importorskip(CASES[name].host)
    module, inputs = CASES[name].build(torch.float64)
    if reentrant and not any(map(_floating, inputs.values())):
        pytest.skip("torch's reentrant way needs an input with gradients")
    agree(gradients(module, inputs, use_reentrant=reentrant), gradients(module, inputs), 1e-12)
