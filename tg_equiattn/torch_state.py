"""The one file that asks in which state torch is: may values be read, which form of a function runs, what may be kept.

torch runs a function in one of three states. *Eager*: operation by operation, on tensors with values. *Traced*: tensors
stand for any tensors, values do not exist, and sizes may be symbols (torch.compile, torch.export, ``make_fx`` with fake
tensors, ``torch.jit.trace``). *Transformed*: operations need rules for transforms (``torch.func``, forward-mode
differentiation, batched gradients). Where a form of a function is for one state, a definition in torch's own operations
runs in the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_map_only

_T = TypeVar("_T")


def untraced(function: Callable[..., _T]) -> Callable[..., _T]:
    """Decorate a function that compilers call while they trace, instead of tracing it."""
    # torch.compiler.assume_constant_result does the same, but would load all of the compiler here
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Which state


def is_traced(x: Tensor | None = None) -> bool:
    """True while torch traces, and if x is a fake tensor."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, FakeTensor)


@untraced  # torch 2.11 takes torch.compiler.is_exporting() to be true in torch.compile, too
def is_exported() -> bool:
    """True while torch.export traces."""
    return torch.compiler.is_exporting()


def is_jit_traced(for_onnx: bool = False) -> bool:
    """True while ``torch.jit.trace`` traces; with ``for_onnx``, while the old exporter of ONNX does."""
    return torch.jit.is_tracing() and (not for_onnx or torch.onnx.is_in_onnx_export())


@untraced
def _in_functorch() -> bool:
    return torch._C._are_functorch_transforms_active()


def is_transformed(*arguments: Any) -> bool:
    """True in a transform of ``torch.func``, in forward-mode differentiation, and if one of the arguments is a batched
    gradient, as ``torch.autograd.grad(..., is_grads_batched=True)`` makes them."""
    if _in_functorch() or forward_ad._current_level >= 0:
        return True
    for x in arguments:  # faster than any() with a generator
        batched = isinstance(x, Tensor) and is_legacy_batchedtensor(x)
        if batched:
            return True
    return False


def is_eager(*arguments: Any) -> bool:
    """True if torch runs operation by operation on these arguments. Only then checkpoints, autograd functions with
    second derivatives of their own, and writing into results pay off or work at all."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed(*arguments))


def is_observed() -> bool:
    """True if a tracer or a dispatch mode sees each operation."""
    return is_traced() or bool(torch._C._len_torch_dispatch_stack())


def is_backward() -> bool:
    """True in a backward pass, where checkpoints repeat calls."""
    return torch._C._current_graph_task_id() != -1


def may_be_checkpointed() -> bool:
    """True in what may be the call of a checkpoint: without gradients, or with hooks for saved tensors."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_whole(x: Tensor) -> bool:
    """True if work on x must be one tile: compilers unroll loops, and sizes of traced tensors may be symbols."""
    return is_traced(x) or not x.numel()


def is_mapped(x: Tensor) -> bool:
    """True if ``torch.vmap`` goes over x, at any level of nested transforms."""
    if torch.compiler.is_compiling():
        return False  # compilers trace through torch.vmap, and refuse to read values themselves
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def is_transformed_tensor(x: Tensor) -> bool:
    """True if x belongs to a transform of ``torch.func``, or may do so in a function that torch.compile traces."""
    return is_transformed() if torch.compiler.is_compiling() else is_functorch_wrapped_tensor(x)


def by_form(definition: Callable[..., _T], fast: Callable[..., _T], traced: bool = False) -> Callable[..., _T]:
    """A function with two forms that compute the same.

    Args:
        definition: runs everywhere.
        fast: runs where torch is eager.
        traced: whether ``fast`` runs in torch.compile, too. The default is false.
    """

    @functools.wraps(definition)
    def function(*arguments: Any) -> _T:
        if torch.compiler.is_compiling():
            is_fast = traced and not (is_exported() or is_transformed())
        else:
            is_fast = is_eager(*arguments)
        return (fast if is_fast else definition)(*arguments)

    return function


def is_fused(device: torch.device) -> bool:
    """True if a compiler fuses operations into kernels of an accelerator. It does not in exported programs."""
    return device.type != "cpu" and torch.compiler.is_compiling() and not is_exported()


def refuse_forward_mode() -> None:
    """Raise RuntimeError in forward-mode differentiation. Every operator calls this function.

    Operators have no forward-mode rule, and torch would take their tangents for zero without a warning. Layers and
    functions of the library use definitions instead, so only compiled or exported programs, and the backward of a graph
    recorded earlier, call operators in forward-mode differentiation.
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode differentiation cannot go through an operator of tg_equiattn in a compiled or exported "
            "program, or in the backward of a graph recorded before it began: tangents would be zero. Transform the "
            "module itself, and compile after that"
        )


@contextlib.contextmanager
def autograd_in_operator() -> Iterator[None]:
    """A context in the body of an operator in which autograd works. It records nothing there unless it is told to."""
    keys, hidden = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard  # as torch.utils.checkpoint does
    with torch.no_grad(), hidden(keys.AutogradFunctionality, False), hidden(keys.ADInplaceOrView, False):
        yield


# Values


def is_readable(*tensors: Tensor | None, wait: bool = False) -> bool:
    """True if values of all tensors, but for None, can be read: they are not traced, and ``torch.vmap`` does not go
    over them. Without ``wait``, they must be on the CPU, too, so that reading costs nothing."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        costs = x is not None and (isinstance(x, FakeTensor) or not (wait or x.device.type == "cpu") or is_mapped(x))
        if costs:
            return False
    return True


def read(x: Tensor, wait: bool = False) -> Any:
    """``x.tolist()``; ``None`` unless :func:`is_readable`."""
    if not is_readable(x, wait=wait):
        return None
    if not _in_functorch():
        return x.tolist()
    while is_functorch_wrapped_tensor(x):  # for which tolist fails in torch 2.8
        x = get_unwrapped(x)
    with temporarily_clear_interpreter_stack():
        return x.tolist()


# Precision


@untraced  # compilers before torch 2.10 stop at it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def is_autocast(x: Tensor) -> bool:
    """True under autocast for the device of x."""
    return _has_autocast(x.device.type) and torch.is_autocast_enabled(x.device.type)


def products_round(x: Tensor) -> bool:
    """True if matrix products of float32 may round their factors, as with TF32, for the dtype of x."""
    return x.dtype != torch.float64 and _float32_rounds()


@untraced
def _float32_rounds() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the precision was set by torch's newer settings
        return True


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off for a device, where it has it: geometry and exponentials stay in their own dtype."""
    if (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()) and _has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


# What is kept


def is_ordinary(x: Tensor) -> bool:
    """True if a tensor has values of its own: it is not on the meta device, fake, or of a transform."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type != "meta" and not is_functorch_wrapped_tensor(x)


def is_inference() -> bool:
    """True in inference mode, which has no derivatives."""
    return torch.is_inference_mode_enabled()


def ordinary_tensors(*inputs: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which new tensors are ordinary tensors, which outlive the call.

    It leaves inference mode, tracers, and transforms of ``torch.func`` unless one of the ``inputs`` belongs to a
    transform.
    """
    if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() or _in_functorch():
        return _outside(*inputs)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _outside(*inputs: Tensor) -> Iterator[None]:
    with contextlib.ExitStack() as left:
        if torch.is_inference_mode_enabled():
            left.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            left.enter_context(unset_fake_temporarily())
            left.enter_context(disable_proxy_modes_tracing())
        if _in_functorch() and not any(is_functorch_wrapped_tensor(x) for x in inputs):
            left.enter_context(temporarily_clear_interpreter_stack())
        yield


def _as_fake(x: Any) -> Any:
    """Convert ordinary tensors to fake tensors if a fake mode is active that refuses ordinary ones."""
    if torch.compiler.is_compiling():
        return x
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None or mode.allow_non_fake_inputs:  # export and tracers allow ordinary tensors
        return x
    return tree_map_only(Tensor, mode.from_tensor, x)


class Cache(dict[Hashable, Any]):
    """Results that are kept for later calls, as ordinary tensors. While torch.compile traces, nothing is kept: its
    program computes them.

    Args:
        maxsize: Number of results that are kept; older ones are dropped. The default keeps all.
    """

    def __init__(self, maxsize: int | None = None) -> None:
        super().__init__()
        self.maxsize = maxsize

    def get_or_make(self, key: Hashable, make: Callable[[], Any], *inputs: Tensor) -> Any:
        """The result of ``make`` for a key, which holds device and dtype. ``inputs`` are the tensors that it reads."""
        if torch.compiler.is_compiling():
            return self[key] if key in self else make()
        try:
            found = self[key]
        except KeyError:
            with ordinary_tensors(*inputs):
                found = self[key] = make()
            if self.maxsize is not None and len(self) > self.maxsize:
                self.pop(list(self)[0], None)  # other threads may drop it, too  # noqa: RUF015
        return _as_fake(found)

    def kept(self, key: Hashable) -> Any:
        """The result for a key that is kept, fake where torch traces with fake tensors."""
        return _as_fake(self[key])


def cached(maxsize: int) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Decorate a function: its last ``maxsize`` results are kept in a :class:`Cache`."""

    def decorate(make: Callable[..., _T]) -> Callable[..., _T]:
        cache = Cache(maxsize)

        @functools.wraps(make)
        def function(*arguments: Any) -> _T:
            if torch.compiler.is_compiling():
                return make(*arguments)
            return cache.get_or_make(arguments, functools.partial(make, *arguments))

        function.cache_clear = cache.clear  # type: ignore[attr-defined]
        return function

    return decorate


class Tables(nn.Module):
    """Tensors that are functions of a module's arguments, and therefore neither parameters, buffers nor state.

    Tables are built once, on the CPU, when the module is constructed. Every device and dtype gets a copy when the
    module moves there or when a call first asks for it. No training tool sees the tables: averages of weights and
    buffers, ``to_empty``, ``load_state_dict(assign=True)`` and construction on the meta device leave them as they are.

    Args:
        build: a function without arguments that returns a tensor or a tuple of tensors, floating point ones in
            float64. Pickle stores it in place of the tables: a module-level function, or a ``functools.partial`` of
            one.

    Example:
        >>> tables = Tables(lambda: torch.arange(3))
        >>> tables(torch.device("cpu"))
        tensor([0, 1, 2])
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        self._build, self._copies = build, Cache()
        with torch.device("cpu"), ordinary_tensors():
            self._exact = build()
        self._kind = torch.device("cpu"), torch.get_default_dtype()  # where the module is
        self._copy_to_module()

    def forward(self, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        """The tables on a device.

        Args:
            device: the device of the input, not of the module: ``torch.func.functional_call`` may run a module of the
                meta device on tensors of another one.
            dtype: dtype of the floating point tables. The default, ``None``, leaves them in float64.
        """
        return self._copies.get_or_make((device, dtype), lambda: _moved(self._exact, device, dtype))

    def _copy_to_module(self) -> None:
        device, dtype = self._kind
        if device.type != "meta":
            for kind in {None, dtype, torch.promote_types(dtype, torch.float32)}:
                self(device, kind)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tables:
        """Make copies where the module moves to, before a compiler or a CUDA graph would have to."""
        with ordinary_tensors():
            moved = fn(torch.empty(0, device=self._kind[0], dtype=self._kind[1]))
        self._kind = moved.device, moved.dtype
        self._copy_to_module()
        return self

    def __reduce__(self) -> Any:
        return Tables, (self._build,)


def _moved(x: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(x, Tensor):
        return x.to(device, dtype if x.is_floating_point() else None)
    moved = [_moved(each, device, dtype) for each in x]
    return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
