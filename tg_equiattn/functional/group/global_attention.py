"""Group self-attention over all pixels in linear time: exact weights in a window, random features beyond."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ...ranks import merge_attentions
from ..operators import use_plain
from ..performer.linear_attention import Inputs, feature_attention, feature_norm
from .attention import group_attention_impl

if TYPE_CHECKING:
    from jaxtyping import Float


def global_group_attention_impl(
    query, key, value, projection, offset_encoding, element_encoding, index, far_bias, window, space_bias=None,
    group_bias=None, dropout=0.0, key_mask=None, plain=False,
) -> Tensor:  # fmt: skip
    r"""Group attention to all pixels in linear time, without checks. Operands must be finite at masked pixels; outputs
    are not masked.

    The weight of the key (j, s) for the output (i, h) is, with u = ``index[h, s]``,

    .. math::
        w = \frac{e^{f(u)}}{n} \langle \phi(q(i,h)), \phi(k(j,s)) \rangle
        + [j \text{ near } i]\, \exp\big(c\, \langle q(i,h),\; k(j,s) + \rho_{space}(h^{-1}(x_j - x_i))
        + \rho_{group}(u) \rangle + b_{space}(h^{-1}(x_j - x_i)) + b_{group}(u)\big),

    and outputs are averages of the values with these weights. :math:`\langle \phi(q), \phi(k) \rangle` is a random
    feature estimate of :math:`\exp(c \langle q, k \rangle)` with :math:`c = 1/\sqrt{C}`. n is the number of keys, so
    that the ratio of both terms does not depend on the size of the image. The group does not act on channels, on which
    the features depend, so attention is exactly equivariant for every draw of the features.

    Operands are those of :func:`group_attention`, except for these:

    - index is (H, S) and means relation ``"relative"``; ``None`` means ``"frame"``: element h attends to keys of h only
    - projection, (m, C), holds the directions of the m random features
    - far_bias holds f, (heads, U); in frames it is (heads, 1)
    - key_mask is true at valid keys. In an image without a valid key outputs are zero
    """
    near, lse = group_attention_impl(
        query, key, value, offset_encoding, element_encoding, index, window, space_bias, group_bias, dropout,
        key_mask, plain,
    )  # fmt: skip
    # in frames, (head, element) pairs act as heads
    bias = far_bias.expand(-1, query.shape[3]).reshape(-1, 1, 1) if index is None else far_bias[:, index]
    far, far_lse = _far(query, key, value, projection, bias, key_mask, use_plain(plain))
    with full_precision(near.device):
        outs = torch.stack([near, torch.nn.functional.dropout(far, dropout)])
        out, _ = merge_attentions(outs, torch.stack([lse, far_lse.to(lse.dtype)]).unsqueeze(3))
    return out.to(near.dtype)


def _merge_elements(
    content: Float[Tensor, "B*heads*S m e"], lse: Float[Tensor, "B*heads*S m"], far_bias: Float[Tensor, "heads H S"]
) -> tuple[Float[Tensor, "B*heads*H m e"], Float[Tensor, "B*heads*H m"]]:
    """From softmax averages and log-sum-exps over the pixels of each key element, those of all key elements for each
    output element, with biases ``far_bias``."""
    heads, _, elements = far_bias.shape
    lse = lse.unflatten(0, (-1, heads, 1, elements)) + far_bias[..., None].to(lse.dtype)
    content = content.unflatten(0, (-1, heads, elements)).movedim(2, 0)  # (S, B, heads, m, e)

    def sums(weight: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
        return weight.sum(0), torch.einsum("sbnhmx,sbnme->bnhme", weight, content)

    content, lse = merge_attentions(content, lse.movedim(3, 0).unsqueeze(-1), sums=sums)
    return content.flatten(0, 2), lse.squeeze(-1).flatten(0, 2)


def _far(
    query, key, value, projection, far_bias, mask, plain
) -> tuple[Float[Tensor, "B heads Cv H *spatial"], Float[Tensor, "B heads H *spatial"]]:
    """Attention by random features only, and its log-sum-exps."""
    heads_and_elements, spatial = query.shape[1:4:2], query.shape[4:]
    # (B, heads |H|, pixels, C)
    q, k, v = (x.flatten(4).permute(0, 1, 3, 4, 2).flatten(1, 2) for x in (query, key, value))
    mask = None if mask is None else mask.flatten(1).expand(query.shape[0], -1)
    key_mask = None if mask is None else mask.repeat_interleave(q.shape[1], 0)
    merge = functools.partial(_merge_elements, far_bias=far_bias)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = feature_attention(Inputs(flat_q, flat_k, flat_v, projection), key_mask, merge)
    out, lse = (x.unflatten(0, q.shape[:2]) for x in (out, lse))
    lse = lse + feature_norm(q.to(lse.dtype), projection)
    if mask is None:
        keys = lse.new_full((), k.shape[2] * far_bias.shape[2])
    else:
        keys = (mask.sum(1).clamp(min=1)[:, None, None, None] * far_bias.shape[2]).to(lse.dtype)
    lse = (lse - keys.log()).unflatten(1, heads_and_elements).squeeze(-1).unflatten(3, spatial)
    return out.unflatten(1, heads_and_elements).permute(0, 1, 4, 2, 3).unflatten(4, spatial), lse
