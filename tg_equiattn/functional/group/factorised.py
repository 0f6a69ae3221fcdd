r"""The arithmetic of group self-attention on one tile of queries: no images, no tiling, no autograd.

Every tensor ends in one axis ``p`` of independent queries (pixels, images and heads alike), contiguous and
innermost, so that each operation below runs over it as one vector. Sizes: ``T`` query elements, ``S`` key
elements, ``H`` output elements, ``U`` arguments of the group encoding (``U = S``), ``D`` neighbors,
``C`` channels.

    query  (T, C, p)      space  (T, D, H, p)  logits <q(i,t), rho_space(h^-1 D)>
    key    (D, S, C, p)   group  (T, U, p)     logits <q(i,t), rho_group(u)>
    value  (D, S, C, p)   index  (H, T, S)     u of each (h, t, s); a permutation of U along S
    bias   (D, p)         0 for a neighbour inside the image, -inf outside
    keep   (D, H, S, p)   dropout factors of the summed weights W, or None
    inverse (H, T, U)     s of each (h, t, u)

The softmax weight of (h, t) over (D, s) is A(t,D,s) S(t,D,h) G(t,h,s) / Z(t,h), a product of three factors that
need only |H|^2 (2 D + 1) exponentials instead of |H|^3 D.

Under torch.compile whole expressions are written, which the compiler fuses; in eager execution small in-place steps.
Both compute the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...transforms import transformed

# Below this normaliser the factors may have lost precision: the caller takes the direct formula instead.
SMALLEST_NORMALISER = {torch.float32: 1e-20, torch.float64: 1e-200}


def factor_dtype(query: Tensor) -> torch.dtype:
    """Off the CPU a normaliser cannot be looked at without waiting for the device, so the factors are double there:
    their product cannot underflow for scores up to several hundred."""
    return query.dtype if query.device.type == "cpu" else torch.float64


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of x * y over the channels, the last axis but one of both."""
    if torch.compiler.is_compiling() or transformed():
        return (x * y).sum(-2)
    total = x[..., 0, :] * y[..., 0, :]
    for c in range(1, x.shape[-2]):
        total.addcmul_(x[..., c, :], y[..., c, :])
    return total


def weighted(weight: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum of weight (..., p) * x (..., C, p) over ``dims``, counted without the channels."""
    if torch.compiler.is_compiling():
        return (weight.unsqueeze(-2) * x).sum(dims)
    return torch.stack([(weight * x[..., c, :]).sum(dims) for c in range(x.shape[-2])], -2)


def full_logits(position: Tensor, group: Tensor | None, index: Tensor) -> Tensor:
    """(T, H, D, S, p) from logits of positions (T, D, H, p) and of the group (T, U, p), or of both (T, D, H U, p)."""
    if group is not None:
        return position.transpose(1, 2)[:, :, :, None] + _gather_group(group, index)[:, :, None]
    position = position.unflatten(2, (len(index), -1))
    element, output = _element_and_output(index)
    return position[element, :, output, index.transpose(0, 1)].transpose(2, 3)


def full_logits_backward(logit: Tensor, factored: bool, inverse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of both from that of :func:`full_logits`."""
    if factored:
        return logit.sum(3).transpose(1, 2), _by_argument(logit.sum(2), inverse).sum(1)
    return _by_argument(logit.transpose(2, 3), inverse).permute(0, 3, 1, 2, 4).flatten(2, 3), None


def _element_and_output(index: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of t and h that broadcast against an (H, T, S) index transposed to (T, H, S)."""
    element = torch.arange(index.shape[1], device=index.device)[:, None, None]
    return element, torch.arange(index.shape[0], device=index.device)[None, :, None]


def _gather_group(group: Tensor, index: Tensor) -> Tensor:
    """(T, U, p) -> (T, H, S, p)."""
    return group[_element_and_output(index)[0], index.transpose(0, 1)]


def _by_argument(x: Tensor, inverse: Tensor) -> Tensor:
    """(T, H, S, ...) rearranged from key elements s to encoding arguments u."""
    element, output = _element_and_output(inverse)
    return x[element, output, inverse.transpose(0, 1)]


def _factors(query: Tensor, key: Tensor, space: Tensor, group: Tensor, index: Tensor, bias: Tensor | None):
    dtype = factor_dtype(query)
    content = dot(query[:, None, None], key[None])
    if bias is not None:  # in both, so that neither maximum sits outside the image
        content, space = content + bias[:, None], space + bias[:, None]
    content = (content - content.amax((1, 2), keepdim=True)).to(dtype).exp()
    space = (space - space.amax(1, keepdim=True)).to(dtype).exp()
    group = (group - group.amax(1, keepdim=True)).to(dtype).exp()
    return content, space, _gather_group(group, index)


def _normalise(product: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G / Z, Z and the sum over neighbors of S A, for a block of query elements."""
    summed = product.sum(1)
    normaliser = (summed * group).sum(2, keepdim=True)
    return group / normaliser.clamp_min(torch.finfo(group.dtype).tiny), normaliser, summed


def _blocks(count: int):
    """One block of all query elements where loops are compiled, one element at a time where they are not."""
    return [slice(None)] if torch.compiler.is_compiling() else [slice(t, t + 1) for t in range(count)]


def _empty_weight(content: Tensor, space: Tensor) -> Tensor:
    """Zeros (D, H, S, p) to add the weights of all query elements to."""
    return content.new_zeros(content.shape[1], space.shape[2], content.shape[2], content.shape[3])


def dropped(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x * keep


def _sum_first(x: Tensor) -> Tensor:
    return x[0] if len(x) == 1 else x.sum(0)


def forward(query, key, value, space, group, index, bias, keep) -> tuple[Tensor, Tensor]:
    """The output (H, C, p) and the smallest normaliser met."""
    content, space, group = _factors(query, key, space, group, index, bias)
    total, smallest = _empty_weight(content, space), []
    for block in _blocks(len(query)):
        product = space[block, :, :, None] * content[block, :, None]  # (t, D, H, S, p)
        scaled, normaliser, _ = _normalise(product, group[block])
        total += _sum_first(product.mul_(scaled[:, None]))
        smallest.append(normaliser.amin())
    weight = dropped(total.to(value.dtype), keep)
    return weighted(weight, value[:, None], (0, 2)), torch.stack(smallest).amin()


def backward(query, key, value, space, group, index, inverse, bias, keep, grad):
    r"""Gradients of query, key, value, space and group, and the smallest normaliser met.

    With P = A S G / Z and dW = <dout, v>: r = sum P dW, dlogit = P (dW - r), and every gradient is a sum of dlogit
    (or of W dout) over the axes its factor lacks.
    """
    content, space, group = _factors(query, key, space, group, index, bias)
    grad_weight = dot(grad[None, :, None], value[:, None])  # (D, H, S, p)
    grad_weight = dropped(grad_weight, keep).to(content.dtype)
    total, smallest = _empty_weight(content, space), []
    to_content, to_space, to_group = [], [], []
    for block in _blocks(len(query)):
        product = space[block, :, :, None] * content[block, :, None]
        scaled, normaliser, summed = _normalise(product, group[block])
        valued = (product * grad_weight).sum(1)
        mean = (scaled * valued).sum(2, keepdim=True)
        to_group.append(scaled * (valued - mean * summed))
        product = product.mul_(scaled[:, None])
        total += _sum_first(product)
        logit = product.mul_(grad_weight - mean[:, None])
        to_space.append(logit.sum(3))
        to_content.append(logit.sum(2))
        smallest.append(normaliser.amin())
    weight = dropped(total.to(value.dtype), keep)
    grad_content = torch.cat(to_content).to(query.dtype)
    grad_value = weighted(weight, grad[None, :, None], (1,))
    grad_query = weighted(grad_content, key[None], (1, 2))
    grad_key = weighted(grad_content, query[:, None, None], (0,))
    grad_space = torch.cat(to_space).to(query.dtype)
    grad_group = _by_argument(torch.cat(to_group).to(query.dtype), inverse).sum(1)
    return grad_query, grad_key, grad_value, grad_space, grad_group, torch.stack(smallest).amin()


def direct_scores(query: Tensor, key: Tensor, position: Tensor, bias: Tensor | None) -> Tensor:
    """All scores (T, H, D, S, p): ``position`` (T, H, D, S, p) holds <q(i,t), rho(h^-1 D, u)>."""
    content = dot(query[:, None, None], key[None])
    if bias is not None:
        content = content + bias[:, None]
    return position + content[:, None]


def _softmax(score: Tensor) -> Tensor:
    return score.flatten(2, 3).softmax(2).view(score.shape)


def direct(score, value, keep) -> Tensor:
    """The formula as written, from all scores (T, H, D, S, p)."""
    weight = _softmax(score).sum(0)  # (H, D, S, p)
    return weighted(dropped(weight, None if keep is None else keep.transpose(0, 1)), value, (1, 2))


def direct_backward(query, key, value, position, bias, keep, grad):
    """Gradients of query, key, value and position."""
    softmax = _softmax(direct_scores(query, key, position, bias))
    keep = None if keep is None else keep.transpose(0, 1)
    grad_weight = dropped(dot(grad[:, None, None], value[None]), keep)  # (H, D, S, p)
    mean = (softmax * grad_weight).sum((2, 3), keepdim=True)
    logit = softmax * (grad_weight - mean)
    content, weight = logit.sum(1), dropped(softmax.sum(0), keep)
    grad_query = weighted(content, key, (1, 2))
    grad_key = weighted(content, query[:, None, None], (0,))
    grad_value = weighted(weight, grad[:, None, None], (0,))
    return grad_query, grad_key, grad_value, logit
