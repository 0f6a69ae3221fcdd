"""Derived tables under what training code and compilers do to modules."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tg_equiattn.tables import Tables

CPU = torch.device("cpu")


def build(shift):
    return (torch.arange(7) + shift) % 7, torch.linspace(0, 1 + shift, 7, dtype=torch.float64)


class Scaled(nn.Module):
    def __init__(self, shift=2):
        super().__init__()
        self.tables = Tables(functools.partial(build, shift))
        self.weight = nn.Parameter(torch.randn(7))

    def forward(self, x):
        index, scale = self.tables(x.device, x.dtype)
        return x[:, index] * scale * self.weight


@pytest.fixture
def module():
    return Scaled()


@pytest.fixture
def x():
    return torch.randn(3, 7)


def test_tables_are_no_state(module):
    assert list(module.state_dict()) == ["weight"]
    assert not list(module.buffers())


def test_copies_keep_exact_numbers(module):
    exact = module.tables(CPU)[1]
    for kind in (torch.float16, torch.float64, torch.bfloat16):
        scale = module.to(kind).tables(CPU, kind)[1]
        assert scale.dtype == kind
        torch.testing.assert_close(scale, exact.to(kind), rtol=0, atol=0)
    assert module.tables(CPU)[0].dtype == torch.int64


def test_fake_tensors_stay_in_their_mode(x):
    with FakeTensorMode() as mode:
        module = Scaled()
        assert module(torch.randn(3, 7)).shape == (3, 7)
    assert torch.equal(module.tables(CPU)[0], build(2)[0])
    real = Scaled()
    with mode:
        real.tables(CPU, torch.float16)
    assert type(real.tables(CPU, torch.float16)[1]) is torch.Tensor


def test_tables_made_in_inference_mode_train(x):
    with torch.inference_mode():
        tables = Tables(functools.partial(build, 2))
    weight = torch.randn(7, requires_grad=True)
    (weight * tables(CPU, torch.float32)[1]).sum().backward()
    assert weight.grad is not None


def test_tables_first_asked_for_in_a_transform_outlive_it(module):
    torch.vmap(lambda x: x * module.tables(CPU, torch.float16)[1])(torch.zeros(2, 7))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(module.tables(CPU, torch.float16)[1])
