"""The states of torch: which form runs, what is read, what is kept; and one file that asks."""

import concurrent.futures
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tg_equiattn.torch_state import Cache, by_form, cached, read

ROOT = Path(__file__).parents[1]
NAMES = (
    r"torch\.(compiler|autocast|amp|is_\w*auto|inference_mode|is_inf\w*ence|_C|_dynamo)|is_tracing|functorch|forward_ad"
)


def test_no_other_file_asks():
    files = [path for name in ("tg_equiattn", "integrations") for path in (ROOT / name).rglob("*.py")]
    strings = re.compile(r'"""(.|\n)*?"""|"[^"\n]*"|#[^\n]*')
    asking = [path.name for path in files if re.search(NAMES, strings.sub("", path.read_text()))]
    assert asking == ["torch_state.py"]


def shown(form):
    """A function that shows where it runs: x + 1 as definition, x + 2 as fast form."""
    return lambda x: x + form


@pytest.mark.parametrize("traced", [False, True])
def test_forms(traced):
    function, x = by_form(shown(1.0), shown(2.0), traced), torch.zeros(2)
    fast, definition = torch.full((2,), 2.0), torch.ones(2)

    def by_transforms(x):
        return torch.vmap(function)(x)

    assert torch.equal(function(x), fast)
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), fast if traced else definition)
    assert torch.equal(torch.compile(by_transforms, backend="eager", fullgraph=True)(x), definition)
    assert torch.equal(by_transforms(x), definition)
    with forward_ad.dual_level():
        assert torch.equal(function(x), definition)
    assert torch.equal(torch.jit.trace(function, x, check_trace=False)(x), definition)

    class Batched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return function(grad)

    y = Batched.apply(x.requires_grad_())
    grads = torch.zeros(3, 2)
    assert torch.equal(
        torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)[0], definition.expand(3, 2)
    )
    assert torch.equal(torch.autograd.grad(y, x, grads[0])[0], fast)


def test_numbers_are_read_where_there_are_some():
    x, found = torch.tensor([1, 2]), []
    assert read(x) == [1, 2]
    with FakeTensorMode() as mode:
        assert read(mode.from_tensor(x)) is None
    torch.vmap(lambda x: found.append(read(x)) or x)(x)
    torch.func.grad(lambda x: found.append(read(x)) or x.sum())(x.float())
    torch.compile(lambda x: x + (read(x) is None), backend="eager", fullgraph=True)(x)
    assert found == [None, [1.0, 2.0]]
    assert read(torch.empty(2, device="meta")) is None


def test_what_is_kept_is_ordinary():
    made = []

    @cached(maxsize=2)
    def table(number):
        made.append(number)
        return torch.full((2,), number)

    with torch.inference_mode():
        kept = table(1.0)
    assert not kept.is_inference()
    assert torch.vmap(lambda x: x + table(1.0).sum())(torch.zeros(3)).tolist() == [2.0] * 3
    assert table(1.0) is kept
    with FakeTensorMode():
        assert (table(1.0) + table(2.0)).shape == (2,)
    assert made == [1.0, 2.0]
    table(3.0)
    table(1.0)  # which has been dropped
    assert made == [1.0, 2.0, 3.0, 1.0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        numbers = [float(n % 5) for n in range(200)]
        assert [float(x[0]) for x in pool.map(table, numbers)] == numbers


def test_a_result_that_depends_on_a_transform_is_not_shared():
    cache, x = Cache(), torch.ones(3)
    assert cache.get_or_make("twice", lambda: 2 * x, x) is cache.get_or_make("twice", lambda: 3 * x, x)
    assert list(cache) == ["twice"]
