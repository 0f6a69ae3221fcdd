"""Activation checkpointing of every public module, by both of torch's ways, gives the gradients of a plain call."""

import pytest
import torch
from cases import CASES, ONE_A_NAME, agree
from group_layers import LAYERS
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tg_equiattn import functional as F
from tg_equiattn.groups import cyclic

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


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, **inputs):
        return self.function(*inputs.values())


PROJECTION = torch.randn(1100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FUNCTIONS = {  # of tensors that take several chunks of each operator
    "linear attention": (lambda q, k, v: F.linear_attention(q, k, v, PROJECTION), [(1, 2, 601, 3)] * 3),
    "vector attention": (F.vector_attention, [(2, 601, 2, 3)] * 3),
    "long convolution": (F.vector_long_conv, [(3, 509, 701, 3)] * 2),
}
IMAGES = {
    "frame": (67, 11, 13),
    "ge_vit": (2, 29, 31),
    "relative": (5, 29, 31),
    "lifting": (67, 11, 13),
    "global": (5, 29, 31),
}


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("name", [*FUNCTIONS, *IMAGES])
def test_operators_in_several_chunks(name, reentrant):
    if name in FUNCTIONS:
        function, shapes = FUNCTIONS[name]
        module = Call(function)
    else:
        module, (batch, *spatial) = LAYERS[name](cyclic(4)).double(), IMAGES[name]
        shapes = [(batch, 3, *([] if name == "lifting" else [4]), *spatial)]
    names = ["x"] if len(shapes) == 1 else ["q", "k", "v"]
    inputs = {n: torch.randn(s, dtype=torch.float64) for n, s in zip(names, shapes, strict=False)}
    agree(gradients(module, inputs, use_reentrant=reentrant), gradients(module, inputs), 1e-12)
