"""Second derivatives of operators with a backward of their own, through their plain compositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
        firsts = torch.autograd.grad(outputs, inputs, grad_outputs, create_graph=True, materialize_grads=True)
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
