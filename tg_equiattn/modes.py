"""Modes and transforms of torch: functions that tell which are active, and helpers to work outside of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_map_only

_T = TypeVar("_T")


def has_autocast(kind: str) -> bool:
    """True if torch has autocast for a kind of device."""
    return torch.amp.is_autocast_available(kind)


has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compilers before torch 2.10 stop at it


def is_exporting() -> bool:
    """True while torch.export traces. The compiler of torch 2.11 takes ``torch.compiler.is_exporting()`` to be true in
    torch.compile, too, so it must not look into this function."""
    return torch.compiler.is_exporting()


is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off for a device, where it has it: geometry and exponentials stay in their own dtype."""
    if (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()) and has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def ordinary_tensors(*inputs: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which new tensors are ordinary tensors, which outlive the call.

    It leaves inference mode, tracers, and transforms of ``torch.func`` unless one of the ``inputs`` belongs to a
    transform.
    """
    if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() or _functorch():
        return _outside_of_modes(*inputs)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _outside_of_modes(*inputs: Tensor) -> Iterator[None]:
    with contextlib.ExitStack() as left:
        if torch.is_inference_mode_enabled():
            left.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            left.enter_context(unset_fake_temporarily())
            left.enter_context(disable_proxy_modes_tracing())
        if _functorch() and not any(is_functorch_wrapped_tensor(x) for x in inputs):
            left.enter_context(temporarily_clear_interpreter_stack())
        yield


def is_ordinary(x: Tensor) -> bool:
    """True if a tensor has values of its own: it is not on the meta device, fake, or of a transform."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type != "meta" and not is_functorch_wrapped_tensor(x)


def as_numbers(x: Tensor) -> list:
    """``x.tolist()``, also for tensors of a transform, for which ``tolist`` fails in torch 2.8."""
    if not _functorch():
        return x.tolist()
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    with temporarily_clear_interpreter_stack():
        return x.tolist()


def as_fake(x: Any) -> Any:
    """Convert ordinary tensors to fake tensors if a fake mode is active that refuses ordinary ones."""
    if torch.compiler.is_compiling():
        return x
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None or mode.allow_non_fake_inputs:  # export and tracers allow ordinary tensors
        return x
    return tree_map_only(Tensor, mode.from_tensor, x)


def _functorch() -> bool:
    return torch._C._are_functorch_transforms_active()


# torch.compiler.assume_constant_result does the same, but would load all of the compiler here: called while tracing.
_functorch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_functorch_transform() -> bool:
    """True in a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp`` and compositions of them) and in forward-mode
    differentiation, in eager execution and while torch.compile traces."""
    return _functorch() or forward_ad._current_level >= 0


def are_batched(gradients: Iterable[Tensor | None]) -> bool:
    """True in the backward of ``torch.autograd.grad(..., is_grads_batched=True)``. That is no transform of
    ``torch.func``, but supports as few operations."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients)


def goes_through(x: Tensor) -> bool:
    """True if x belongs to a transform of ``torch.func``, or may do so in a function that torch.compile traces."""
    return in_functorch_transform() if torch.compiler.is_compiling() else is_functorch_wrapped_tensor(x)


def runs_eagerly() -> bool:
    """True if torch runs operation by operation: no tracer and no transform of ``torch.func`` is active.

    Only then checkpoints, autograd functions with second derivatives of their own, and writing into results pay off
    or work at all.
    """
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or in_functorch_transform())


def is_traced(x: Tensor) -> bool:
    """True if x stands for any tensor: under torch.compile, torch.export and ``make_fx`` with fake tensors."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def is_whole(x: Tensor) -> bool:
    """True if work on x must be one tile: traced tensors have symbols for sizes, and compilers unroll loops."""
    return is_traced(x) or torch.jit.is_tracing() or not x.numel()


def is_batched(x: Tensor) -> bool:
    """True if ``torch.vmap`` goes over x, at any level of nested transforms."""
    if torch.compiler.is_compiling():
        return False  # compilers trace through torch.vmap, and refuse to read values themselves
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def is_readable(x: Tensor) -> bool:
    """True if values of x can be read, for which CUDA waits: not while x is traced or ``torch.vmap`` goes over it."""
    return not is_traced(x) and not is_batched(x)


def is_concrete(x: Tensor) -> bool:
    """True if reading values of x costs nothing: they are readable and on the CPU. Values are checked only then."""
    return x.device.type == "cpu" and is_readable(x)


def cached(maxsize: int) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Decorate a function: its last ``maxsize`` results are kept, as ordinary tensors. Compilers trace the function
    itself."""

    def decorate(make: Callable[..., _T]) -> Callable[..., _T]:
        @functools.lru_cache(maxsize)
        def ordinary(*arguments: Any) -> _T:
            with ordinary_tensors():
                return make(*arguments)

        @functools.wraps(make)
        def cached_function(*arguments: Any) -> _T:
            return make(*arguments) if torch.compiler.is_compiling() else as_fake(ordinary(*arguments))

        return cached_function

    return decorate


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
