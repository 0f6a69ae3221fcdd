"""Which of torch's modes and transforms are at work, and what has to be done without them or otherwise under them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_map_only


def has_autocast(kind: str) -> bool:
    """Whether torch has autocast for a kind of device."""
    return torch.amp.is_autocast_available(kind)


has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compilers before torch 2.10 stop at it


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off for a device, where it has it: geometry and exponentials stay in their own dtype."""
    if has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def ordinary_tensors(*inputs: Tensor) -> Iterator[None]:
    """Make ordinary tensors, which outlive the call, whatever mode the call is made in: inference mode, a tracer,
    or a transform of ``torch.func`` unless one of the ``inputs`` belongs to it."""
    ordinary = not any(is_functorch_wrapped_tensor(x) for x in inputs)
    outside = temporarily_clear_interpreter_stack() if ordinary else contextlib.nullcontext()
    with torch.inference_mode(False), unset_fake_temporarily(), disable_proxy_modes_tracing(), outside:
        yield


def is_ordinary(x: Tensor) -> bool:
    """Whether a tensor has values of its own, here: not on the meta device, fake, or of a transform."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type != "meta" and not is_functorch_wrapped_tensor(x)


def as_numbers(x: Tensor) -> list:
    """``x.tolist()``, of a tensor of a transform too, whose numbers torch 2.8 does not read by itself."""
    if torch.compiler.is_compiling() or not _functorch():
        return x.tolist()
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    with temporarily_clear_interpreter_stack():
        return x.tolist()


def as_fake(x: Any) -> Any:
    """Ordinary tensors, as the fake tensors that an active fake mode asks for in place of them."""
    if torch.compiler.is_compiling():
        return x
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None or mode.allow_non_fake_inputs:  # which export and tracers set: they keep ordinary tensors
        return x
    return tree_map_only(Tensor, mode.from_tensor, x)


def _functorch() -> bool:
    return torch._C._are_functorch_transforms_active()


# What torch.compiler.assume_constant_result does, which would load all of the compiler here: called while tracing.
_functorch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_functorch_transform() -> bool:
    """Whether a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp`` and what is made of them) or a level of
    forward-mode differentiation is at work, in eager execution and while torch.compile traces."""
    return _functorch() or forward_ad._current_level >= 0


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``, written out under transforms.

    Nested transforms of ``torch.func`` and nested forward-mode differentiation take the mean and the deviation inside
    torch's own operator for constants, and their second derivatives are wrong without a word (pytorch issue 196700).
    """

    def forward(self, input: Tensor) -> Tensor:
        if not in_functorch_transform():
            return super().forward(input)
        axes = tuple(range(-len(self.normalized_shape), 0))
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - wide.mean(axes, keepdim=True)
        out = centred * (centred.square().mean(axes, keepdim=True) + self.eps).rsqrt()
        return (out * self.weight + self.bias).to(input.dtype)
