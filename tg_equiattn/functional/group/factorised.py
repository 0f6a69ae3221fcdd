r"""The arithmetic of group self-attention on one tile of queries: no images, no tiling, no autograd.

Every tensor ends in one axis ``p`` of independent queries (pixels, images and heads alike), contiguous and
innermost, so that each operation below runs over it as one vector. Sizes: ``T`` query elements, ``S`` key
elements, ``H`` output elements, ``U`` arguments of the group encoding (``U = S``), ``D`` neighbors,
``C`` channels.

    query  (T, C, p)      position  (T, D, H, p)  logits <q(i,t), rho_space(h^-1 D)>
    key    (D, S, C, p)   group     (T, U, p)     logits <q(i,t), rho_group(u)>
    value  (D, S, C, p)   index     (H, T, S)     u of each (h, t, s); a permutation of U along S
    bias   (D, p)         0 for a neighbour inside the image, -inf outside
    keep   (D, H, S, p)   dropout factors of the summed weights W, or None
    inverse (H, T, U)     s of each (h, t, u)

The softmax weight of (h, t) over (D, s) is A(t,D,s) S(t,D,h) G(t,h,s) / Z(t,h), a product of three factors that
need only |H|^2 (2 D + 1) exponentials instead of |H|^3 D. It runs on the CPU: elsewhere the smallest normaliser cannot
be looked at without waiting, and exponentials are cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .direct import blocks, by_argument, dot, dropped, gather_group, sums

# Below this normaliser the factors may have lost precision: the caller takes the direct formula instead.
SMALLEST_NORMALISER = {torch.float32: 1e-20, torch.float64: 1e-200}


def _factors(query: Tensor, key: Tensor, space: Tensor, group: Tensor, index: Tensor, bias: Tensor | None):
    content = dot(query[:, None, None], key[None])
    if bias is not None:  # in both, so that neither maximum sits outside the image
        content, space = content + bias[:, None], space + bias[:, None]
    content = (content - content.amax((1, 2), keepdim=True)).exp()
    space = (space - space.amax(1, keepdim=True)).exp()
    group = (group - group.amax(1, keepdim=True)).exp()
    return content, space, gather_group(group, index)


def _normalise(product: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G / Z, Z and the sum over neighbors of S A, for a block of query elements."""
    summed = product.sum(1)
    normaliser = (summed * group).sum(2, keepdim=True)
    return group / normaliser.clamp_min(torch.finfo(group.dtype).tiny), normaliser, summed


def _empty_weight(content: Tensor, space: Tensor) -> Tensor:
    """Zeros (D, H, S, p) to add the weights of all query elements to."""
    return content.new_zeros(content.shape[1], space.shape[2], *content.shape[2:])


def _sum_first(x: Tensor) -> Tensor:
    return x[0] if len(x) == 1 else x.sum(0)


def forward(query, key, value, position, group, index, bias, keep) -> tuple[Tensor, Tensor]:
    """The output (H, C, p) and the smallest normaliser met."""
    content, space, group = _factors(query, key, position, group, index, bias)
    total, smallest = _empty_weight(content, space), []
    for block in blocks(len(query)):
        product = space[block, :, :, None] * content[block, :, None]  # (t, D, H, S, p)
        scaled, normaliser, _ = _normalise(product, group[block])
        total += _sum_first(product.mul_(scaled[:, None]))
        smallest.append(normaliser.amin())
    weight = dropped(total, keep)
    return sums(weight, value[:, None], (0, 2)), torch.stack(smallest).amin()


def backward(query, key, value, position, group, index, inverse, bias, keep, grad):
    """Gradients of query, key, value, position and group, and the smallest normaliser met: with P = A S G / Z,
    dW = <dout, v>, r = sum P dW and dlogit = P (dW - r), sums of dlogit (or W dout) over the axes a factor lacks."""
    content, space, group = _factors(query, key, position, group, index, bias)
    grad_weight = dot(grad[None, :, None], value[:, None])  # (D, H, S, p)
    grad_weight = dropped(grad_weight, keep)
    total, smallest = _empty_weight(content, space), []
    to_content, to_space, to_group = [], [], []
    for block in blocks(len(query)):
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
    weight = dropped(total, keep)
    grad_content = torch.cat(to_content)
    grad_value = sums(weight, grad[None, :, None], (1,))
    grad_query = sums(grad_content, key[None], (1, 2))
    grad_key = sums(grad_content, query[:, None, None], (0,))
    grad_space = torch.cat(to_space)
    grad_group = by_argument(torch.cat(to_group), inverse).sum(1)
    return grad_query, grad_key, grad_value, grad_space, grad_group, torch.stack(smallest).amin()
