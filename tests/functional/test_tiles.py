"""Formulas computed tile by tile: results and all derivatives are those of the formula, from the tensors alone."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch.autograd import grad, gradgradcheck

from tg_equiattn.functional.tiles import WHOLE, Shape, Tile, map_tiles, recomputed, tiled


class Scale(NamedTuple):
    power: int
    factor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: Scale
    name: str = "sin"


def rows(x, y, frozen):
    """A formula of nodes x with records of tensors."""
    return getattr(torch, frozen.name)(x @ y) * frozen.scale.factor**frozen.scale.power


def window(power, x, y, mask):
    """A moving average with weights, and their sums."""
    weights = (x.unfold(0, 3, 1) * y[:, None]).cos() ** power
    weights = weights if mask is None else weights * mask[:, None]
    return weights.sum(1), weights.sum(0)


def outer(x, y):
    return x[:, None] * y


def d(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def tiled_window(x, y, mask, steps):
    tiles = [
        Tile(2, (slice(a, b + 2), slice(a, b), slice(a, b)), (slice(a, b), slice(None)))
        for a, b in itertools.pairwise(steps)
    ]
    return tiled(window, tiles, (x, y, mask), (Shape((steps[-1],), True), Shape((3,))), (False, True, True))


def test_map_of_nodes_with_records():
    x, y, frozen = d(11, 3), d(3, 2, seed=1), Frozen(Scale(3, d(2, seed=2)))

    def run(x, y, factor):
        return map_tiles(rows, 4, (x,), y, Frozen(Scale(3, factor)))

    torch.testing.assert_close(run(x, y, frozen.scale.factor), rows(x, y, frozen), rtol=1e-14, atol=1e-14)
    assert gradgradcheck(run, (x, y, frozen.scale.factor))
    with torch.no_grad():
        torch.testing.assert_close(run(x, y, frozen.scale.factor), rows(x, y, frozen), rtol=1e-14, atol=1e-14)


def test_third_derivatives():
    found = []
    for run in (functools.partial(tiled_window, steps=(0, 3, 7)), functools.partial(window, 2)):
        x, y = d(9), d(7, seed=1)
        out = run(x=x, y=y, mask=None)[0].sum()
        for _ in range(3):
            (out,) = grad(out, y, create_graph=True)
            out = out.square().sum()
        found.append(grad(out, (x, y)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_tiles", [False, True])
def test_no_more_than_inputs_is_saved(by_tiles):
    saved, x, y = [], d(100), d(98)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        tiled_window(x, y, None, (0, 50, 98)) if by_tiles else recomputed(outer, x, y)
    assert max(saved, default=0) <= 100


def test_writing_to_a_tensor_before_backward_is_an_error():
    x, y = d(100), d(98)
    for run in (functools.partial(recomputed, outer), functools.partial(tiled_window, mask=None, steps=(0, 50, 98))):
        out = run(x, y)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=r"a tensor has been written to|modified by an inplace operation"):
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(d(3, 2, seed=1))

    def forward(self, x):
        return torch.sin(x @ self.weight)


def applied(x, module):
    return module(x)


def test_a_module_has_the_weights_of_the_call_in_backward():
    """Forward runs with other weights, as in an ensemble; the module then has its own again, which are set to NaN."""
    module, x, other = Module(), d(11, 3), d(3, 2, seed=5)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return map_tiles(applied, 4, (x,), module)

    out = torch.func.functional_call(Model(), {"module.weight": other}, x)
    with torch.no_grad():
        module.weight.fill_(torch.nan)
    found = grad(out.square().sum(), (x, other), create_graph=True)
    wanted = grad(torch.sin(x @ other).square().sum(), (x, other), create_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    found, wanted = (grad(sum(y.square().sum() for y in both), (x, other)) for both in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert bool(module.weight.isnan().all())


@pytest.mark.parametrize(
    ("function", "others", "named"),
    [
        (lambda x: x, (), "lambda"),
        (functools.partial(outer, torch.ones(3)), (), "partial"),
        (Module().forward, (), "forward"),
        (outer, ((1, {"a": 2}),), "dict"),
    ],
)
def test_what_could_change_is_refused(function, others, named):
    with pytest.raises(TypeError, match=f"function of a module file.*{named}"):
        recomputed(function, d(3), *others)
    with pytest.raises(TypeError, match=f"function of a module file.*{named}"):
        map_tiles(function, 2, (d(3),), *others)
    with pytest.raises(TypeError, match=f"function of a module file.*{named}"):
        tiled(function, [Tile(others, (WHOLE,), (WHOLE,))], (d(3),), ())


def test_closures_are_refused():
    y = d(3)

    def inner(x):
        return x * y

    with pytest.raises(TypeError, match="function of a module file"):
        recomputed(inner, d(3))
    with pytest.raises(TypeError, match="tensors among them"):
        tiled(window, [Tile(y, (WHOLE,), (WHOLE,))], (d(3),), ())
