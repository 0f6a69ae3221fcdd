"""Products of weights with many tokens: sums in parts are the plain product, in derivatives of both orders."""

import pytest
import torch
from cases import agree, layer, run
from devices import DEVICES
from emulated import accelerator, emulated, to_accelerator, values
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tg_equiattn.functional.vector import channel_product as module
from tg_equiattn.functional.vector.channel_product import channel_product, product_in_parts
from tg_equiattn.nn import CliffordMLP


@pytest.fixture
def few(monkeypatch):
    """Few tokens are many."""
    monkeypatch.setattr(module, "MANY_TOKENS", 8)


@pytest.mark.parametrize("tokens", [64, 130, 70])
def test_parts_and_what_is_left_add_up(tokens):
    x, y = torch.randn(3, 5, tokens, dtype=torch.float64), torch.randn(3, 7, tokens, dtype=torch.float64)
    torch.testing.assert_close(product_in_parts(x, y), x @ y.mT)
    assert not torch.allclose(product_in_parts(x[..., 1:], y[..., 1:]), x @ y.mT)


@pytest.mark.parametrize("biased", [True, False])
def test_both_derivatives_are_those_of_the_plain_product(biased):
    shapes = [(2, 3, 5), (2, 5, 130), (2, 3, 1)][: 2 + biased]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    apply = lambda *x: module._SummedInParts.apply(*x, *[None] * (3 - len(x)))  # noqa: E731
    assert torch.autograd.gradcheck(apply, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(apply, inputs, fast_mode=True)
    torch.testing.assert_close(apply(*inputs), channel_product(*inputs))


def test_a_module_on_an_accelerator_gets_the_cpus_gradients(few):
    module, inputs = layer(lambda: CliffordMLP(3, 5, num_blocks=1), 130, 3, 8).build(torch.float64)
    expected = run(module, inputs)
    module, inputs = to_accelerator(module), tree_map(emulated, inputs)
    with accelerator():
        agree(tree_map(values, run(module, inputs)), expected, 1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_gradients_are_those_of_float32_to_rounding(device):
    shapes = (2, 3, 5), (2, 5, 5000), (2, 3, 1)
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    weight, x, bias = inputs
    expected = torch.autograd.grad((weight @ x + bias).square().mean(), inputs)
    with torch.autocast(device, torch.bfloat16):
        out = module._SummedInParts.apply(*inputs)
    found = torch.autograd.grad(out.float().square().mean(), inputs)
    assert out.dtype == torch.bfloat16
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_within_a_checkpoint(reentrant):
    weight, x = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (2, 5, 130)))
    product = lambda w, x: module._SummedInParts.apply(w, x, None)  # noqa: E731
    out = checkpoint(product, weight, x, use_reentrant=reentrant)
    expected = torch.autograd.grad((weight @ x).square().sum(), (weight, x))
    out.square().sum().backward()
    torch.testing.assert_close((weight.grad, x.grad), expected)


def test_compiled_it_is_one_graph():
    weight, x = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (2, 5, 130)))
    run = torch.compile(lambda w, x: module._SummedInParts.apply(w, x, None), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(run(weight, x).square().sum(), (weight, x))
    expected = torch.autograd.grad((weight @ x).square().sum(), (weight, x))
    torch.testing.assert_close(found, expected)
