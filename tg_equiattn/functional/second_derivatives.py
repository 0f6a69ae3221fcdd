"""Derivatives of operators with a backward of their own: the second ones through their plain compositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..modes import transformed


def second_derivatives(
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    r"""The backward pass of a backward pass.

    With :math:`g = \nabla_x \langle \text{grad\_outputs}, \text{plain}(x) \rangle`, which is what an operator's own
    backward computes, the gradients of :math:`\langle \text{cotangents}, g \rangle`. They can be differentiated in turn
    where gradients are being recorded.

    Args:
        plain: the operator as differentiable operations of torch, a function of ``inputs`` alone.
        inputs: x.
        grad_outputs: one for each output of ``plain``.
        cotangents: one for each of the inputs, ``None`` for zeros.

    Returns:
        Gradients of every input, then of every one of ``grad_outputs``.
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
    op: Any, backward_op: Any, plain: Callable[..., tuple[Tensor, Tensor]], count: int, *, keep: bool = False,
    second: Callable[..., tuple[Tensor, ...]] | None = None,
) -> None:  # fmt: skip
    """Give an operator of two outputs its derivatives.

    Args:
        op: of tensors, the first ``count`` of which have gradients, and of settings behind them.
        backward_op: their gradients, of those of the outputs, the outputs if ``keep``, and what ``op`` takes.
        plain: ``op`` as differentiable operations of torch.
        second: as :func:`second_derivatives`, with those operands, and what else ``op`` takes, in place of a function.
    """
    kept = 2 if keep else 0

    def save(ctx, inputs, output):
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.save_for_backward(*output[:kept], *tensors)
        ctx.settings = inputs[len(tensors) :]

    def backward(ctx, *grads):
        tensors = ctx.saved_tensors[kept:]
        if transformed():  # since the forward pass
            rest = *tensors[count:], *ctx.settings
            found = torch.func.vjp(lambda *x: plain(*x, *rest), *tensors[:count])[1](grads)
        else:
            found = backward_op(*grads, *ctx.saved_tensors, *ctx.settings)
        return *found, *[None] * (len(tensors) - count + len(ctx.settings))

    def save_backward(ctx, inputs, output):
        save(ctx, inputs, ())

    def backward_twice(ctx, *cotangents):
        upstream, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2 + kept :]
        operands, rest = tensors[:count], (*tensors[count:], *ctx.settings)
        if second is None:
            found = second_derivatives(lambda *x: plain(*x, *rest), operands, upstream, cotangents)
        else:
            found = second(operands, upstream, cotangents, *rest)
        return *found[count:], *[None] * kept, *found[:count], *[None] * len(rest)

    op.register_autograd(backward, setup_context=save)
    backward_op.register_autograd(backward_twice, setup_context=save_backward)
