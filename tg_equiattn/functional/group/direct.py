"""The formula of group self-attention as written, on the layout of :mod:`.factorised`, and what all forms share.

``position`` holds logits of encodings: (T, D, H, p) beside those of the group (T, U, p), or with a full encoding, where
``group`` is None, (T, D, H U, p). With the pointwise relation ``index`` is (1, T, S), H = 1 is no axis of the output,
and its elements are those of the query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...modes import transformed


def _written_whole() -> bool:
    """Whether expressions have to be without memory of their own: for a compiler, tracers, transforms, autograd."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return traced or torch.is_grad_enabled() or transformed()


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of x * y over the channels, the last axis but one of both."""
    if torch.compiler.is_compiling() or transformed():
        return (x * y).sum(-2)
    total = x[..., 0, :] * y[..., 0, :]
    for c in range(1, x.shape[-2]):
        total.addcmul_(x[..., c, :], y[..., c, :])
    return total


def sums(weight: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum of weight (..., p) times x (..., C, p) over ``dims``, counted without the channels: one channel at a time,
    which the compiler joins to one loop that reads the weights once."""
    if _written_whole():
        return torch.stack([(weight * x[..., c, :]).sum(dims) for c in range(x.shape[-2])], -2)
    product = torch.empty_like(weight)  # the same memory for all channels: it is in the cache
    return torch.stack([torch.mul(weight, x[..., c, :], out=product).sum(dims) for c in range(x.shape[-2])], -2)


def blocks(count: int) -> list[slice]:
    """One block of all query elements where loops are compiled, one element at a time where they are not."""
    return [slice(0, count)] if torch.compiler.is_compiling() else [slice(t, t + 1) for t in range(count)]


def dropped(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x * keep


def _element_and_output(index: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of t and h that broadcast against an (H, T, S) index transposed to (T, H, S)."""
    element = torch.arange(index.shape[1], device=index.device)[:, None, None]
    return element, torch.arange(index.shape[0], device=index.device)[None, :, None]


def gather_group(group: Tensor, index: Tensor) -> Tensor:
    """(T, U, p) -> (T, H, S, p)."""
    return group[_element_and_output(index)[0], index.transpose(0, 1)]


def by_argument(x: Tensor, inverse: Tensor) -> Tensor:
    """(T, H, S, ...) rearranged from key elements s to encoding arguments u."""
    element, output = _element_and_output(inverse)
    return x[element, output, inverse.transpose(0, 1)]


def scores(query, key, position, group, index, bias) -> Tensor:
    """All of them, (T, H, D, S, p)."""
    content = dot(query[:, None, None], key[None])
    if bias is not None:
        content = content + bias[:, None]
    if group is not None:
        logits = position.transpose(1, 2)[:, :, :, None] + gather_group(group, index)[:, :, None]
    else:
        element, output = _element_and_output(index)
        position = position.unflatten(2, (len(index), -1))
        logits = position[element, :, output, index.transpose(0, 1)].transpose(2, 3)
    return logits + content[:, None]


def forward(query, key, value, position, group, index, bias, keep, paired=False) -> tuple[Tensor, Tensor]:
    """The output (H, C, p), and with the pointwise relation the logarithm (T, p) of the sum of exponentials of a
    query's scores, else nothing."""
    score = scores(query, key, position, group, index, bias)
    weight = score.flatten(2, 3).softmax(2).view(score.shape)  # whose derivatives subtract means first
    level = score[:, 0].flatten(1, 2).logsumexp(1) if paired else score.new_zeros(0)
    weight = weight[:, 0] if paired else weight.sum(0)  # (H, D, S, p)
    out = sums(dropped(weight, None if keep is None else keep.transpose(0, 1)), value, (1, 2))
    return out, level


def backward(query, key, value, position, group, index, inverse, bias, keep, grad):
    """Gradients of query, key, value, position and group, of all relations but the pointwise one."""
    score = scores(query, key, position, group, index, bias)
    softmax = score.flatten(2, 3).softmax(2).view(score.shape)
    keep = None if keep is None else keep.transpose(0, 1)
    grad_weight = dropped(dot(grad[:, None, None], value[None]), keep)  # (H, D, S, p)
    logit = softmax * (grad_weight - (softmax * grad_weight).sum((2, 3), keepdim=True))
    content, weight = logit.sum(1), dropped(softmax.sum(0), keep)
    grad_query = sums(content, key, (1, 2))
    grad_key = sums(content, query[:, None, None], (0,))
    grad_value = sums(weight, grad[:, None, None], (0,))
    if group is not None:
        to_group = by_argument(logit.sum(2), inverse).sum(1)
        return grad_query, grad_key, grad_value, logit.sum(3).transpose(1, 2), to_group
    to_position = by_argument(logit.transpose(2, 3), inverse).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return grad_query, grad_key, grad_value, to_position, None
