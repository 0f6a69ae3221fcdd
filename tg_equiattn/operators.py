"""Operators: the form in which an operator is computed, the size of its tiles, and operators that run tiles.

An operator is opaque to torch's transforms: those of ``torch.func`` cannot look into it, and forward-mode
differentiation would take its tangents for zero. So every operator has a definition in torch's own operations, which
runs in all transforms. While torch.compile traces for an accelerator, the definition replaces the operator, too: a
compiler fuses it into a few kernels, and an operator launches many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .modes import in_functorch_transform, is_exporting
from .tiles import Call, gradients, is_whole, tiled

FEW_NUMBERS = 1 << 13  # a CPU computes this many numbers in the time of a call of an operator
_MORE = 1 << 7  # times as many on an accelerator
_TILE_BYTES = 2 << 30  # memory of all tensors of a chunk on an accelerator
DEFINITION, OPERATOR = "definition", "operator"


def choose_form(x: Tensor, numbers: int, plain: bool = False) -> str:
    """The form of an operator: ``DEFINITION`` or ``OPERATOR``.

    Args:
        x: an operand, on the device where the operator runs.
        numbers: size of each of the four large tensors that a compiled definition makes. Compilers for accelerators get
            the definition if they fit in memory.
        plain: ask for the definition.
    """
    if use_plain(plain):
        return DEFINITION
    if x.device.type == "cpu" or not torch.compiler.is_compiling() or is_exporting():
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


Plan = tuple[Call, tuple["Tensor | None", ...]]


def tile_operator(
    name: str, schema: str, plan: Callable[..., Plan], outputs: Callable[..., tuple[Tensor, ...]], num_gradients: int,
    num_results: int,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """A function that runs tiles. While torch traces, it calls an operator that runs tiles, unless ``plain`` is set.

    Args:
        name: name of the operator; its backward pass is an operator with this name and ``_backward``.
        schema: the schema of the operands. Tensors come first.
        plan: gives the arguments of :func:`.tiled` for the operands. Its tensors begin with the operands that
            have gradients.
        outputs: makes empty results for the operands.
        num_gradients: number of operands with gradients, which come first.
        num_results: number of results.
    """

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
            out = run_tiles(*operands)
        return out if num_results > 1 else out[0]

    def backward_body(*tensors: Any) -> Any:
        refuse_forward_mode()
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
        ctx.settings = inputs[len(tensors) :]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # torch unpacks once where it checkpoints
        sums, operands = saved[:num_results], (*saved[num_results:], *ctx.settings)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            out = backward_operator(*grads, *sums, *operands)
        else:  # derivatives of any order
            out = pull_back(grads, tuple(x.detach() for x in sums), operands)
        return *out, *[None] * (len(operands) - num_gradients)

    forward_operator.register_autograd(backward, setup_context=save)

    def call(*operands: Any, plain: bool = False) -> tuple[Tensor, ...]:
        if use_plain(plain) or not is_whole(operands[0]):
            return run_tiles(*operands)
        out = forward_operator(*operands)
        return out if num_results > 1 else (out,)

    return call
