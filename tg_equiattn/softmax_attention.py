"""Softmax attention over all pairs of a row by torch's kernels, with second derivatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import hashed_dropout
from .operators import tile_numbers
from .shapes import Bool, Float, Int
from .tiles import map_tiles
from .torch_state import is_eager, is_transformed

_BLOCK_PAIRS = 1 << 20  # pairs of a tile on a CPU
_WIDTH = 8  # torch's kernels on GPUs need widths that are multiples of this


def softmax_attention(
    q: Float[Tensor, "rows nodes channels"], k: Float[Tensor, "rows keys d"], v: Float[Tensor, "rows keys e"],
    mask: Bool[Tensor, "rows keys"] | None, dropout: float = 0.0,
) -> Float[Tensor, "rows nodes channels"]:  # fmt: skip
    """Softmax attention within rows, with all channels as one head, over the keys that are true in ``mask``.

    Scores are inner products, without a factor. ``mask=None`` means all keys. Masked keys and values may be NaN;
    queries must be finite. Outputs of a row without keys are finite. If queries have one more channel than keys, this
    channel is the score of one more key, whose value is zero. This key is never dropped, and its weight is one more
    channel of the output.
    """
    extra, channels = q.shape[-1] - k.shape[-1], v.shape[-1]
    if mask is not None:
        k, v = (torch.where(mask[..., None], x, 0.0) for x in (k, v))
        mask = F.pad(mask, (0, extra), value=True) if extra else mask
    if extra or q.shape[-1] != channels:  # torch's kernels need one width
        width = -(-max(q.shape[-1], channels + extra) // _WIDTH) * _WIDTH
        q, k, v = _widened(q, width), _widened(k, width, extra), _widened(v, width, extra)
    q, k, v = (x[:, None].contiguous() for x in (q, k, v))  # torch's kernels in O(N) memory need this layout
    return softmax_attention_of_heads(q, k, v, mask, dropout, 1.0, extra)[:, 0, :, : channels + extra]


def softmax_attention_of_heads(
    q: Float[Tensor, "rows heads nodes d"], k: Float[Tensor, "rows heads keys d"],
    v: Float[Tensor, "rows heads keys d"], mask: Bool[Tensor, "rows keys"] | None, dropout: float = 0.0,
    scale: float = 1.0, extra: int = 0,
) -> Float[Tensor, "rows heads nodes d"]:  # fmt: skip
    """Softmax attention of heads over the keys that are true in ``mask``, by torch's kernels, with derivatives of all
    orders. Scores are inner products times ``scale``. Outputs of a row without keys are finite. The last ``extra`` keys
    are not dropped."""
    if mask is not None:
        mask = (mask | ~mask.any(1, keepdim=True))[:, None, None]  # a softmax over no keys would be NaN
    if dropout or is_transformed():
        return _plain_attention(q, k, v, mask, dropout, scale, extra)
    channels, rest = v.shape[-1], -q.shape[-1] % _WIDTH
    if rest and q.device.type != "cpu":
        q, k, v = (F.pad(x, (0, rest)) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if torch.is_grad_enabled() and is_eager():
        out = _SecondDerivatives.apply(out, q, k, v, mask, scale)
    return out[..., :channels]


def _widened(
    x: Float[Tensor, "rows nodes channels"], width: int, extra: int = 0
) -> Float[Tensor, "rows nodes+extra width"]:
    """Add channels of zeros; and one node, if ``extra`` is 1, that is 1 in the first of them."""
    channels = x.shape[-1]
    wide = F.pad(x, (0, width - channels))
    if not extra:
        return wide
    return torch.cat([wide, F.pad(x.new_ones(x.shape[0], 1, 1), (channels, width - channels - 1))], 1)


def _plain_attention(
    q: Float[Tensor, "rows heads nodes d"], k: Float[Tensor, "rows heads keys d"],
    v: Float[Tensor, "rows heads keys e"], mask: Bool[Tensor, "rows 1 1 keys"] | None, dropout: float, scale: float,
    extra: int = 0,
) -> Float[Tensor, "rows heads nodes e"]:  # fmt: skip
    """The definition, with a mask of keys, in tiles of queries. The last ``extra`` keys are not dropped."""
    pairs = tile_numbers(q.device, _BLOCK_PAIRS, 4)
    step = max(1, pairs // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    seed = hashed_dropout.draw_seed(dropout, q.device)
    row, column = hashed_dropout.hashes(q[..., 0].numel(), k.shape[2], seed)
    each, settings = (q.movedim(2, 0), row.view(q.shape[:3]).movedim(2, 0)), (dropout, scale, extra)
    return map_tiles(_of_queries, step, each, k, v, mask, column, settings).movedim(0, 2)


def _of_queries(
    q: Float[Tensor, "some rows heads d"], row: Int[Tensor, "some rows heads"], k: Float[Tensor, "rows heads keys d"],
    v: Float[Tensor, "rows heads keys e"], mask: Bool[Tensor, "rows 1 1 keys"] | None, column: Int[Tensor, " keys"],
    settings: tuple[float, float, int],
) -> Float[Tensor, "some rows heads e"]:  # fmt: skip
    dropout, scale, extra = settings
    score = (q.movedim(0, 2) * scale) @ k.mT
    score = score if mask is None else score.masked_fill(~mask, torch.finfo(q.dtype).min)
    weight = score.softmax(-1)
    if dropout:
        keep = hashed_dropout.keep(row.movedim(0, 2)[..., None], column, dropout, q.dtype)
        weight = weight * F.pad(keep[..., : keep.shape[-1] - extra], (0, extra), value=1.0)
    return (weight @ v).movedim(2, 0)


class _SecondDerivatives(torch.autograd.Function):
    """The identity for the output of torch's attention, which chooses how its gradient is computed.

    torch's fast kernels have no second derivatives and no rules for transforms. In an ordinary backward pass, the
    gradient goes on through torch's attention. If gradients are being recorded in backward, or are transformed, it goes
    through the definition instead.
    """

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        recorded = torch.is_grad_enabled()
        if not recorded and not is_transformed(grad):
            return grad, None, None, None, None, None
        q, k, v, mask = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (x.view_as(x) for x in (q, k, v))
            out = _plain_attention(q, k, v, mask, 0.0, ctx.scale)
        needed = ctx.needs_input_grad[1:4]
        wanted = [x for x, wants in zip((q, k, v), needed, strict=True) if wants]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=recorded))
        return None, *(next(found) if wants else None for wants in needed), None, None


def merge_attentions(
    outs: Float[Tensor, "sets ..."], lses: Float[Tensor, "sets ..."]
) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
    r"""Merge softmax averages of disjoint sets of keys, with the log-sum-exps of their scores, which broadcast.

    .. math::
        \mathrm{lse} = \log \sum_n e^{\mathrm{lse}_n}, \qquad
        \mathrm{out} = \sum_n e^{\mathrm{lse}_n - \mathrm{lse}}\; \mathrm{out}_n
    """
    top = lses.detach().amax(0)
    weights = (lses - top).exp()
    total = weights.sum(0)
    return (weights * outs).sum(0) / total, total.log() + top
