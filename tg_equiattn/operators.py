"""Operators: the form in which an operator is computed, the size of its tiles, and operators that run tiles.

An operator is opaque to torch's transforms: those of ``torch.func`` cannot look into it, and forward-mode
differentiation would take its tangents for zero. So every operator has a definition in torch's own operations, which
runs in all transforms. While torch.compile traces for an accelerator, the definition replaces the operator, too: a
compiler fuses it into a few kernels, and an operator launches many.

GPU kernels, in ``gpu_kernels.py`` of a family, are second bodies of an operator. They are off by default.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .modes import as_in_transforms, in_functorch_transform, is_exporting
from .tiles import Call, gradients, is_whole, tiled

FEW_NUMBERS = 1 << 13  # a CPU computes this many numbers in the time of a call of an operator
_MORE = 1 << 7  # times as many on an accelerator
_TILE_BYTES = 2 << 30  # memory of all tensors of a chunk on an accelerator
DEFINITION, OPERATOR = "definition", "operator"


def choose_form(x: Tensor, numbers: int, plain: bool = False, kernel: bool = False) -> str:
    """The form of an operator: ``DEFINITION`` or ``OPERATOR``.

    Args:
        x: an operand, on the device where the operator runs.
        numbers: size of each of the four large tensors that a compiled definition makes. Compilers for accelerators get
            the definition if they fit in memory.
        plain: ask for the definition.
        kernel: true if a GPU kernel computes the operator. Compilers get the operator then.
    """
    if use_plain(plain):
        return DEFINITION
    if kernel or x.device.type == "cpu" or not torch.compiler.is_compiling() or is_exporting():
        return OPERATOR  # exported programs are for all sizes, so that no size can decide
    return DEFINITION if numbers <= tile_numbers(x.device, 0, 4) else OPERATOR


def are_few(numbers: int, device: torch.device) -> bool:
    """True if a device computes so many numbers in the time of a call of an operator."""
    return 0 < numbers <= (FEW_NUMBERS if device.type == "cpu" else _MORE * FEW_NUMBERS)


def use_plain(plain: bool = False) -> bool:
    """True if an operator runs as its definition: if asked to, and in transforms."""
    return plain or in_functorch_transform()


def tile_numbers(device: torch.device, on_cpu: int, tensors: int) -> int:
    """The number of elements that each large tensor of a chunk may have.

    Chunks should stay in the cache of a CPU; on an accelerator they should be large, so that there are few launches.

    Args:
        device: the device.
        on_cpu: the number on a CPU.
        tensors: number of large tensors. On other devices they share 2 GiB, in float32.
    """
    return on_cpu if device.type == "cpu" else _TILE_BYTES // (4 * tensors)


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


_kernels_are_on = os.environ.get("TG_EQUIATTN_GPU_KERNELS") == "1"


@contextlib.contextmanager
def use_gpu_kernels(enabled: bool = True) -> Iterator[None]:
    """A context in which group attention within windows and vector attention run as Triton kernels on a GPU.

    Kernels are off by default, since they have not run on a GPU yet:
    :func:`tg_equiattn.testing.check_gpu_kernels` compares them with the definition on yours. The environment variable
    ``TG_EQUIATTN_GPU_KERNELS=1`` switches them on in a whole program. A backward pass uses kernels if its forward
    pass did. Kernels need an NVIDIA GPU of compute capability 8.0 or newer, Triton 3.4 or newer, and heads of at most
    16 channels (8 in float64). Other layers, and larger heads, run without them.

    Args:
        enabled: False switches kernels off. The default is True.
    """
    global _kernels_are_on
    before, _kernels_are_on = _kernels_are_on, enabled
    try:
        yield
    finally:
        _kernels_are_on = before


def missing_for_kernels(device: torch.device) -> str | None:
    """What kernels lack on a device, in words; ``None`` if they can run. Triton's interpreter runs them on a CPU."""
    return _missing(device)


missing_for_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _missing(device: torch.device) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and (device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available()):
        return f"kernels run on NVIDIA GPUs, got device {str(device)!r}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 4):
        return f"Triton must be 3.4 or newer, got {triton.__version__}"
    capability = (8, 0) if interpreted else torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"compute capability must be 8.0 or newer, got {capability}"


class Kernels(NamedTuple):
    """Kernels of an operator.

    Attributes:
        module: module with functions ``forward`` and ``backward`` of the operands. It imports Triton.
        fits: true if the kernels can compute the operands.
    """

    module: str
    fits: Callable[..., bool]

    def compute(self, *operands: Any) -> bool:
        """True if kernels are switched on and compute these operands. Transforms and export need the definition."""
        if not _kernels_are_on or in_functorch_transform() or is_exporting() or not operands[0].numel():
            return False
        return missing_for_kernels(operands[0].device) is None and self.fits(*operands)

    def call(self, name: str, *tensors: Any) -> Any:
        function = getattr(importlib.import_module(self.module, __package__), name)
        with torch.no_grad(), torch.cuda.device_of(tensors[0]):
            return function(*tensors)


def _in_transform(*grads: Tensor) -> bool:
    """True if a backward pass is in a transform, which may have begun since the forward pass."""
    with as_in_transforms(*grads):
        return in_functorch_transform()


Plan = tuple[Call, tuple["Tensor | None", ...]]


def tile_operator(
    name: str, schema: str, plan: Callable[..., Plan], outputs: Callable[..., tuple[Tensor, ...]], num_gradients: int,
    num_results: int, kernels: Kernels | None = None,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """A function that runs tiles. While torch traces, and where kernels are switched on, it calls an operator that runs
    tiles or kernels, unless ``plain`` is set.

    Args:
        name: name of the operator; its backward pass is an operator with this name and ``_backward``.
        schema: the schema of the operands. Tensors come first.
        plan: gives the arguments of :func:`.tiled` for the operands. Its tensors begin with the operands that
            have gradients.
        outputs: makes empty results for the operands.
        num_gradients: number of operands with gradients, which come first.
        num_results: number of results.
        kernels: GPU kernels of the operator, if it has some.
    """

    def fitting_kernels(*operands: Any) -> Kernels | None:
        """The kernels if they compute these operands."""
        return kernels if kernels is not None and kernels.compute(*operands) else None

    def run_tiles(*operands: Any) -> tuple[Tensor, ...]:
        if not operands[0].numel():
            return outputs(*operands)
        call, tensors = plan(*operands)
        return tiled(call.function, call.tiles, tensors, call.shapes, call.once, call.known)

    def pull_back(grads: tuple[Tensor, ...], sums: tuple[Tensor, ...], operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if not sums[0].numel():
            return tuple(torch.zeros_like(x) for x in operands[:num_gradients])
        call, tensors = plan(*operands)
        wanted = (True,) * num_gradients + (False,) * (len(tensors) - num_gradients)
        return gradients(call, tensors, wanted, grads, sums if call.known else ())

    def body(*operands: Any) -> Any:
        refuse_forward_mode()
        with torch.no_grad():
            fitting = fitting_kernels(*operands)
            out = fitting.call("forward", *operands) if fitting else run_tiles(*operands)
        return out if num_results > 1 else out[0]

    def backward_body(*tensors: Any) -> Any:
        refuse_forward_mode()
        fitting = fitting_kernels(*tensors[2 * num_results :])
        if fitting:
            return fitting.call("backward", *tensors)
        keys, hidden = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard  # as torch.utils.checkpoint does
        # autograd records nothing in the body of an operator, unless it is told to
        with torch.no_grad(), hidden(keys.AutogradFunctionality, False), hidden(keys.ADInplaceOrView, False):
            return pull_back(tensors[:num_results], tensors[num_results : 2 * num_results], tensors[2 * num_results :])

    def returns(count: int) -> str:
        return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    custom = torch.library.custom_op
    forward_operator = custom(name, body, mutates_args=(), schema=f"({schema}) -> {returns(num_results)}")
    known = ", ".join(f"Tensor {kind}{n}" for kind in ("grad", "out") for n in range(num_results))
    backward_operator = custom(
        f"{name}_backward", backward_body, mutates_args=(), schema=f"({known}, {schema}) -> {returns(num_gradients)}"
    )

    @forward_operator.register_fake
    def _(*operands: Any) -> Any:
        empty = outputs(*operands)
        return empty if num_results > 1 else empty[0]

    @backward_operator.register_fake
    def _(*operands: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in operands[2 * num_results : 2 * num_results + num_gradients])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.save_for_backward(*((output,) if num_results == 1 else output), *tensors)
        ctx.settings, ctx.kernels = inputs[len(tensors) :], fitting_kernels(*inputs)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # torch unpacks once where it checkpoints
        sums, operands = saved[:num_results], (*saved[num_results:], *ctx.settings)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            out = backward_operator(*grads, *sums, *operands)
        elif ctx.kernels and not torch.is_grad_enabled() and not _in_transform(*grads):
            out = ctx.kernels.call("backward", *grads, *sums, *operands)
        else:  # derivatives of any order
            out = pull_back(grads, tuple(x.detach() for x in sums), operands)
        return *out, *[None] * (len(operands) - num_gradients)

    forward_operator.register_autograd(backward, setup_context=save)

    def call(*operands: Any, plain: bool = False) -> tuple[Tensor, ...]:
        if use_plain(plain) or not (is_whole(operands[0]) or fitting_kernels(*operands)):
            return run_tiles(*operands)
        out = forward_operator(*operands)
        return out if num_results > 1 else (out,)

    return call
