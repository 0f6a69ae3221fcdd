"""Tables of parameters are computed once within a context, and change nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention, GroupTransformer, LiftingAttention, SE3HyenaOperator, cached_tables


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(function):
    with Operations() as operations:
        out = function()
    return out, operations.count


IMAGES = torch.randn(2, 3, 4, 5, 7)
CASES = {
    "frame": (lambda: GroupAttention(cyclic(4), 3, 5, kernel_size=3), (IMAGES,)),
    "relative": (lambda: GroupAttention(cyclic(4), 3, 5, relation="relative", content_heads=2), (IMAGES,)),
    "lifting": (lambda: LiftingAttention(cyclic(4), 3, 5, kernel_size=3), (IMAGES[:, :, 0],)),
    "model": (lambda: GroupTransformer(cyclic(4), 3, 2, channels=(4, 4)), (IMAGES[:, :, 0],)),
    "implicit filter": (
        lambda: SE3HyenaOperator(3, 2, filter="implicit"), (torch.randn(2, 7, 3), torch.randn(2, 7, 2, 3))
    ),
}  # fmt: skip


def results(layer, inputs):
    out = layer(*inputs)
    return sum(x.square().sum() for x in out) if isinstance(out, tuple) else out.square().sum()


@pytest.mark.parametrize("case", CASES)
def test_the_same_with_fewer_operations(case):
    make, inputs = CASES[case]
    layer = make()
    expected, before = counted(lambda: results(layer, inputs))
    gradients = torch.autograd.grad(expected, layer.parameters(), allow_unused=True)
    with cached_tables():
        first, _ = counted(lambda: results(layer, inputs))
        second, after = counted(lambda: results(layer, inputs))
        found = torch.autograd.grad((first + second) / 2, layer.parameters(), allow_unused=True)
    assert after < 0.9 * before
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
    torch.testing.assert_close(found, gradients)


def test_values_of_parameters_are_seen():
    """Also of other parameters in their place, after steps of optimizers, in other modes and in transforms."""
    make, inputs = CASES["frame"]
    layer, other = make(), make()
    weights, plain = dict(other.named_parameters()), layer(*inputs)
    with cached_tables():
        with torch.autocast("cpu"):
            layer(*inputs)
        torch.testing.assert_close(layer(*inputs), plain)
        torch.testing.assert_close(torch.func.functional_call(layer, weights, inputs), other(*inputs))
        with torch.inference_mode():
            layer(*inputs)
        slopes = torch.func.grad(lambda x: layer(x).square().sum())(*inputs)
        assert slopes.isfinite().all()
        assert layer(*inputs).requires_grad
        with torch.no_grad():
            for own, its in zip(layer.parameters(), other.parameters(), strict=True):
                own.copy_(its)
        torch.testing.assert_close(layer(*inputs), other(*inputs))
        expected = layer(*inputs)
        layer.out.bias.data += 1
        layer.locality.centre.data += 1
        assert torch.allclose(layer(*inputs), expected + 1)  # writes to data are seen after the context
    assert not torch.allclose(layer(*inputs), expected + 1)
