"""Operators: the choice between eager tiles and a torch.library operator, and the sizes of tiles.

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

from .tiles import Call, gradients, tiled
from .torch_state import autograd_in_operator, is_fused, is_observed, is_transformed, is_whole, refuse_forward_mode

FEW_NUMBERS = 1 << 13  # a CPU computes this many numbers in the time of a call of an operator
_MORE = 1 << 7  # times as many on an accelerator
_TILE_BYTES = 2 << 30  # memory of all tensors of a tile on an accelerator


def by_operator(x: Tensor, numbers: int, plain: bool = False) -> bool:
    """True if an operator runs, and not its definition.

    Args:
        x: an operand, on the device where the operator runs.
        numbers: size of each of the four large tensors that a compiled definition makes. Compilers for accelerators get
            the definition if they fit in memory. Exported programs are for all sizes, so that no size can decide.
        plain: ask for the definition.
    """
    return not (plain or is_transformed() or (is_fused(x.device) and numbers <= tile_numbers(x.device, 0, 4)))


def are_few(numbers: int, device: torch.device) -> bool:
    """True if a device computes so many numbers in the time of a call of an operator."""
    return 0 < numbers <= (FEW_NUMBERS if device.type == "cpu" else _MORE * FEW_NUMBERS)


def is_small(x: Tensor, numbers: int) -> bool:
    """True for a call on a CPU of so few numbers that the definition takes less time than an operator. Tracing and
    dispatch modes get the operator, so that graphs do not depend on sizes."""
    return x.device.type == "cpu" and not is_observed() and are_few(numbers, x.device)


def tile_numbers(device: torch.device, on_cpu: int, tensors: int) -> int:
    """The number of elements that each large tensor of a tile may have.

    Chunks should stay in the cache of a CPU; on an accelerator they should be large, so that there are few launches.

    Args:
        device: the device.
        on_cpu: the number on a CPU.
        tensors: number of large tensors. On other devices they share 2 GiB, in float32.
    """
    return on_cpu if device.type == "cpu" else _TILE_BYTES // (4 * tensors)


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
        with autograd_in_operator():
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
        if is_observed():
            out = backward_operator(*grads, *sums, *operands)
        else:  # derivatives of any order
            out = pull_back(grads, tuple(x.detach() for x in sums), operands)
        return *out, *[None] * (len(operands) - num_gradients)

    forward_operator.register_autograd(backward, setup_context=save)

    def call(*operands: Any, plain: bool = False) -> tuple[Tensor, ...]:
        if plain or is_transformed() or not is_whole(operands[0]):
            return run_tiles(*operands)
        out = forward_operator(*operands)
        return out if num_results > 1 else (out,)

    return call
