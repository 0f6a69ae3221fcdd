"""Operators that run tile by tile in compiled and exported programs. In eager mode the tiles run without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backend import refuse_forward_mode, use_plain
from .tiles import Call, gradients, is_whole, tiled

Plan = tuple[Call, tuple["Tensor | None", ...]]


def tile_operator(
    name: str, operands: str, plan: Callable[..., Plan], outputs: Callable[..., tuple[Tensor, ...]], moving: int,
    results: int,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """A function that runs tiles. While torch traces, it calls an operator that runs them, unless ``plain`` is set.

    Args:
        name: name of the operator; its backward pass is an operator with this name and ``_backward``.
        operands: schema of the operands. Tensors come first.
        plan: gives the arguments of :func:`.tiles.tiled` for the operands. Its tensors begin with the operands that
            have gradients.
        outputs: makes empty results for the operands.
        moving: number of operands with gradients, which come first.
        results: number of results.
    """

    def run(*given: Any) -> tuple[Tensor, ...]:
        if not given[0].numel():
            return outputs(*given)
        call, tensors = plan(*given)
        return tiled(call.function, call.tiles, tensors, call.shapes, call.once, call.known)

    def pulled(grads: tuple[Tensor, ...], sums: tuple[Tensor, ...], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if not sums[0].numel():
            return tuple(torch.zeros_like(x) for x in given[:moving])
        call, tensors = plan(*given)
        wanted = (True,) * moving + (False,) * (len(tensors) - moving)
        return gradients(call, tensors, wanted, grads, sums if call.known else ())

    def body(*given: Any) -> Any:
        refuse_forward_mode()
        with torch.no_grad():
            found = run(*given)
        return found if results > 1 else found[0]

    def backward_body(*given: Any) -> Any:
        refuse_forward_mode()
        keys, hidden = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard  # as torch.utils.checkpoint does
        # autograd records nothing in the body of an operator, unless it is told to
        with torch.no_grad(), hidden(keys.AutogradFunctionality, False), hidden(keys.ADInplaceOrView, False):
            return pulled(given[:results], given[results : 2 * results], given[2 * results :])

    def returns(count: int) -> str:
        return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    custom = torch.library.custom_op
    forward_operator = custom(name, body, mutates_args=(), schema=f"({operands}) -> {returns(results)}")
    known = ", ".join(f"Tensor {kind}{n}" for kind in ("grad", "out") for n in range(results))
    backward_operator = custom(
        f"{name}_backward", backward_body, mutates_args=(), schema=f"({known}, {operands}) -> {returns(moving)}"
    )

    @forward_operator.register_fake
    def _(*given: Any) -> Any:
        empty = outputs(*given)
        return empty if results > 1 else empty[0]

    @backward_operator.register_fake
    def _(*given: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in given[2 * results : 2 * results + moving])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.save_for_backward(*((output,) if results == 1 else output), *tensors)
        ctx.settings = inputs[len(tensors) :]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # torch unpacks once where it checkpoints
        sums, given = saved[:results], (*saved[results:], *ctx.settings)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            found = backward_operator(*grads, *sums, *given)
        else:  # derivatives of any order
            found = pulled(grads, tuple(x.detach() for x in sums), given)
        return *found, *[None] * (len(given) - moving)

    forward_operator.register_autograd(backward, setup_context=save)

    def call(*given: Any, plain: bool = False) -> tuple[Tensor, ...]:
        if use_plain(plain) or not is_whole(given[0]):
            return run(*given)
        found = forward_operator(*given)
        return found if results > 1 else (found,)

    return call
