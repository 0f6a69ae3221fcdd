"""Activation checkpointing of every public module, by both of torch's ways, gives the gradients of a plain call."""

import copy

import pytest
import torch
from cases import CASES, ONE_A_NAME, agree, is_floating
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tg_equiattn.linear.random_features import RandomFeatures

both_ways = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])


def gradients(module, inputs, **way):
    """Outputs of a module, and gradients of its floating point inputs and parameters after ``backward``."""
    module.zero_grad()
    given = {n: x.detach().requires_grad_() if is_floating(x) else x for n, x in inputs.items()}

    def run(*values):
        return module(**dict(zip(given, values, strict=True)))

    found = checkpoint(run, *given.values(), **way) if way else run(*given.values())
    out = [x for x in tree_leaves(found) if is_floating(x)]
    sum((x * torch.cos(torch.arange(x.numel()).to(x)).view_as(x)).sum() for x in out).backward()
    leaves = [*filter(is_floating, given.values()), *module.parameters()]
    return out, [None if x.grad is None else x.grad.clone() for x in leaves]


@both_ways
@pytest.mark.parametrize("name", [name for name in ONE_A_NAME if name != "RandomFeatures"])  # no inputs
def test_modules(name, reentrant):
    pytest.importorskip(CASES[name].host)
    module, inputs = CASES[name].build(torch.float64)
    if reentrant and not any(map(is_floating, inputs.values())):
        pytest.skip("torch's reentrant way needs an input with gradients")
    agree(gradients(module, inputs, use_reentrant=reentrant), gradients(module, inputs), 1e-12)


DRAWS = ["GlobalGroupAttention", "PerformerAttention", "RelativePerformerConv"]


@both_ways
@pytest.mark.parametrize("name", DRAWS)
def test_draws_between_two_checkpointed_calls(name, reentrant):
    """Each call is repeated in backward with the random features that it had."""
    pytest.importorskip(CASES[name].host)
    start, found = torch.get_rng_state(), []
    for checkpointed in (False, True):
        torch.set_rng_state(start)
        module, inputs = CASES[name].build(torch.float64)
        draws = [part for part in module.modules() if isinstance(part, RandomFeatures)]
        given = {n: x.requires_grad_() if is_floating(x) else x for n, x in inputs.items()}

        def run(*values, module=module, names=tuple(given)):
            return module(**dict(zip(names, values, strict=True)))

        outs, losses = [], []
        for _ in range(2):
            values = given.values()
            outs.append(checkpoint(run, *values, use_reentrant=reentrant) if checkpointed else run(*values))
            losses.append(outs[-1].square().sum())
            if not checkpointed:
                losses.pop().backward()
            for part in draws:
                part.redraw_features()
        for loss in losses:
            loss.backward()
        found.append([x.grad for x in module.parameters() if x.grad is not None])
        assert float((outs[0] - outs[1]).detach().abs().max()) > 1e-3
    agree(*found, 1e-12)


class Draws(torch.nn.Module):
    """A layer with random features, as a function of one tensor, and its features."""

    def __init__(self, name):
        super().__init__()
        self.layer, inputs = CASES[name].build(torch.float64)
        self.x = inputs.pop("x")
        self.rest = inputs
        (self.features,) = (part for part in self.modules() if isinstance(part, RandomFeatures))

    def forward(self, x):
        return self.layer(x, **self.rest)


@both_ways
@pytest.mark.parametrize("without_last", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_and_checkpoints_without_the_state_of_random_numbers(name, without_last, reentrant):
    """Draws after backward have the gradients of a plain call, also after a plain call that has no backward. A call of
    an earlier draw is refused, in whichever order, with and without a draw after the last call."""
    pytest.importorskip(CASES[name].host)
    module = Draws(name)
    module(module.x)
    way = {"use_reentrant": reentrant, "preserve_rng_state": False}
    for _ in range(3):
        plain, x = copy.deepcopy(module), module.x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(plain(x).square().sum(), x)
        (2 * checkpoint(module, x, **way)).square().sum().backward()
        agree([x.grad], [4 * wanted], 1e-12)
        module.features.redraw_features()
    x = module.x.clone().requires_grad_()
    losses = []
    for _ in range(2):
        losses.append(checkpoint(module, x, **way).square().sum())
        if not (without_last and losses[1:]):
            module.features.redraw_features()
    with pytest.raises(RuntimeError, match="pass preserve_rng_state=True, or call redraw_features after backward"):
        losses[0].backward()
