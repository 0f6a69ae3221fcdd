"""Derivatives of operators with a backward of their own. Second derivatives go through their definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .backend import use_plain


def second_derivatives(
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    r"""The backward pass of a backward pass.

    An operator's backward computes :math:`g = \nabla_x \langle \text{grad\_outputs}, \text{plain}(x) \rangle`. This
    function computes the gradients of :math:`\langle \text{cotangents}, g \rangle`. They can be differentiated in turn
    if gradients are being recorded.

    Args:
        plain: the operator's definition in differentiable operations of torch, a function of ``inputs`` only.
        inputs: the inputs x.
        grad_outputs: a gradient for each output of ``plain``.
        cotangents: a gradient for each component of g, one for each of the inputs; ``None`` means zeros.

    Returns:
        The gradients of all ``inputs``, followed by those of all ``grad_outputs``.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs, grad_outputs = ([_in_graph(x) for x in tensors] for tensors in (inputs, grad_outputs))
        outputs = plain(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        moving = [n for n, y in enumerate(outputs) if y.requires_grad]
        ends, given = ([tensors[n] for n in moving] for tensors in (outputs, grad_outputs))
        firsts = torch.autograd.grad(ends, inputs, given, create_graph=True, materialize_grads=True)
        chosen = [(first, c) for first, c in zip(firsts, cotangents, strict=True) if c is not None]
        chosen = [(first, c) for first, c in chosen if first.requires_grad]
        if not chosen:
            return tuple(torch.zeros_like(x) for x in (*inputs, *grad_outputs))
        return torch.autograd.grad(
            [first for first, _ in chosen],
            (*inputs, *grad_outputs),
            [c for _, c in chosen],
            create_graph=recorded,
            materialize_grads=True,
        )


def _in_graph(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def register_derivatives(
    op: Any, backward_op: Any, plain: Callable[..., Tensor | tuple[Tensor, ...]], count: int, *, keep: bool = False,
    outputs: int | None = None, second: Callable[..., Sequence[Tensor | None]] | None = None,
) -> None:  # fmt: skip
    """Register the first and second derivatives of an operator.

    Args:
        op: operator whose arguments are tensors followed by settings. The first ``count`` tensors have gradients.
        backward_op: operator that returns these ``count`` gradients. Its arguments are the gradients of the outputs,
            the outputs if ``keep``, and the inputs of ``op``. If the gradients consist of operators again, it is a
            sequence of ``count`` differentiable functions of the same arguments instead, one for the gradient of each
            input. Only the needed ones are called, and second derivatives are those of these functions.
        plain: definition of ``op`` in differentiable operations of torch. It is differentiated for second derivatives,
            and if a transform has begun since the forward pass.
        count: number of differentiable inputs.
        keep: save the outputs for the backward pass as well.
        outputs: number of outputs with gradients. The default, ``None``, means all. ``plain`` returns these outputs
            only; the others are for the backward pass, and missing gradients stay ``None``.
        second: function that computes the second derivatives instead of :func:`second_derivatives`, for example chunk
            by chunk. It takes the differentiable inputs, the gradients of the outputs (and the outputs if ``keep``),
            the gradients of the first gradients, and the other inputs of ``op``. It returns gradients of the first two.
    """
    returned = len(op._opoverload._schema.returns)
    moving, kept = outputs or returned, returned if keep else 0

    def save(ctx, inputs, output):
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        output = (output,) if isinstance(output, Tensor) else output
        ctx.save_for_backward(*output[:kept], *tensors)
        ctx.settings = inputs[len(tensors) :]
        ctx.set_materialize_grads(outputs is None)

    def backward(ctx, *grads):
        saved, grads = ctx.saved_tensors, grads[:moving]  # torch unpacks saved tensors once where it checkpoints
        tensors = saved[kept:]
        operands, rest = tensors[:count], (*tensors[count:], *ctx.settings)
        if any(grad is None for grad in grads):
            found = [None] * count
        elif use_plain():  # a transform has begun since the forward pass
            _, pull = torch.func.vjp(lambda *x: plain(*x, *rest), *operands)
            found = pull(grads if moving > 1 else grads[0])
        elif isinstance(backward_op, Sequence):
            given = *grads, *saved, *ctx.settings
            needed = zip(backward_op, ctx.needs_input_grad[:count], strict=True)
            found = [gradient(*given) if wanted else None for gradient, wanted in needed]
        else:
            found = backward_op(*grads, *saved, *ctx.settings)
        return *found, *[None] * len(rest)

    def save_backward(ctx, inputs, output):
        save(ctx, inputs, ())

    def backward_twice(ctx, *cotangents):
        saved = ctx.saved_tensors
        given, tensors = saved[: moving + kept], saved[moving + kept :]
        operands, rest = tensors[:count], (*tensors[count:], *ctx.settings)
        if second is None:
            found = second_derivatives(lambda *x: plain(*x, *rest), operands, given[:moving], cotangents)
            found = *found, *[None] * kept
        else:
            found = second(operands, given, cotangents, *rest)
        return *found[count:], *found[:count], *[None] * len(rest)

    op.register_autograd(backward, setup_context=save)
    if not isinstance(backward_op, Sequence):
        backward_op.register_autograd(backward_twice, setup_context=save_backward)
