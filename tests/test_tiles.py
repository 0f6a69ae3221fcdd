"""Formulas computed tile by tile: results and all derivatives are those of the formula, from the tensors alone."""

import concurrent.futures
import functools
import itertools
import subprocess
import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention
from tg_equiattn.tiles import WHOLE, Shape, Tile, map_tiles, recomputed, tiled

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")


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


def test_writing_to_a_tensor_before_backward_is_an_error():
    x, y = d(100), d(98)
    for run in (functools.partial(recomputed, outer), functools.partial(tiled_window, mask=None, steps=(0, 50, 98))):
        out = run(x, y)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=r"a tensor has been written to|modified by an inplace operation"):
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()


@pytest.mark.parametrize(
    ("function", "others", "named"),
    [
        (lambda x: x, (), "lambda"),
        (functools.partial(outer, torch.ones(3)), (), "partial"),
        (torch.nn.Linear(3, 3).forward, (), "forward"),
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


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's attention, compiled
@pytest.mark.parametrize("kernel_size", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_transforms_of_a_backward_that_begin_after_the_forward(kernel_size):
    """Batched gradients are no state of a thread or of a context: the gradients themselves say so."""
    layer = GroupAttention(cyclic(4), 4, 4, kernel_size=kernel_size).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, grads = d(1, 4, 4, 4, 4), d(3, 1, 4, 4, 4, 4, seed=1).detach()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)

    def slopes(y, **options):
        return torch.autograd.grad(y, x, retain_graph=True, **options)[0]

    wanted = torch.stack([slopes(layer(x), grad_outputs=g) for g in grads])
    for y in (layer(x), compiled(x)):
        batched = functools.partial(slopes, y, grad_outputs=grads, is_grads_batched=True)
        torch.testing.assert_close(batched(), wanted)
        torch.testing.assert_close(torch.vmap(lambda g, y=y: slopes(y, grad_outputs=g))(grads), wanted)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            torch.testing.assert_close(pool.submit(batched).result(), wanted)
    second = slopes(sum(slopes(layer(x), grad_outputs=g, create_graph=True).square().sum() for g in grads))
    torch.testing.assert_close(
        slopes(slopes(layer(x), grad_outputs=grads, is_grads_batched=True, create_graph=True).square().sum()), second
    )


def test_a_checkpoint_around_keeps_no_tensor_of_a_checkpoint_within():
    inside = []

    def run(x):
        y = x.cos()
        inside.append(StorageWeakRef(y.untyped_storage()))
        return recomputed(outer, y, y)

    out = checkpoint(run, d(3), use_reentrant=False)
    assert inside[0].expired()
    out.sum().backward()


_FAULTS = """
import platform, resource, statistics, torch
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention
torch.set_num_threads(1)
layer, x = GroupAttention(cyclic(4), 16, 16), torch.randn(4, 16, 4, 32, 32, requires_grad=True)
counts = []
for _ in range(15):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layer(x).square().sum().backward()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median_low(counts[5:]) if platform.libc_ver()[0] == "glibc" else 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other allocators keep memory by other rules")
def test_memory_of_tiles_is_not_fetched_again_in_each_step():
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1000  # pages; 3,500 if it is
