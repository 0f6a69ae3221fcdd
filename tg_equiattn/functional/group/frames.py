"""Attention of group elements in their own frames, and what it is without content."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...grids import Neighbourhood
from ...modes import full_precision, transformed
from ..backend import compiler_fuses, use_plain
from .frame_windows import chunks, frame_attention_op, plain_frame_attention
from .fused_frames import fused_frame_attention
from .hashed_dropout import draw_seed
from .masks import zero_where_hidden
from .operands import check_frame_attention
from .plan import HIDDEN
from .window import in_square, places_of_pairs, window

# Scores held at once where all pixels are keys; more are computed chunk by chunk, and again in backward.
WHOLE_NUMBERS = 1 << 26


def frame_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rho_space: Tensor,
    *,
    neighbourhood: Neighbourhood,
    space_bias: Tensor | None = None,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Every group element attends in its own frame: to the same element of other pixels.

    .. math::
        \mathrm{out}(i, h) = \sum_{D} \mathrm{softmax}_D\big(c\, \langle q(i, h),\; k(i + D, h)
        + \rho(h^{-1} D) \rangle + b(h^{-1} D)\big)\; v(i + D, h)

    over offsets D of the window, or of all pixels, with :math:`c = 1/\sqrt{C}`. It is equivariant for every group;
    elements meet in the linear maps before and after it (:class:`tg_equiattn.nn.GroupLinear`). A pixel and head takes
    :math:`|H| D` scores, where :func:`group_attention` of relation ``"relative"`` takes :math:`|H|^2 D`. With one
    element of queries, keys and values it is lifting self-attention.

    Scores are made again in backward. Where all pixels are keys, weights and values meet in matrix products, whose
    operands TF32 rounds where it is switched on.

    Arguments and errors are those of :func:`group_attention`; ``rho_space`` encodes rotated offsets alone.

    Shapes:
        - query, key: ``(B, heads, C, T, *spatial)``; value: ``(B, heads, Cv, T, *spatial)``; T is ``|H|`` or 1
        - rho_space: ``(|H|, D, C)``, D in the order of :meth:`Neighbourhood.offsets`; space_bias: ``(heads, |H|, D)``
        - mask: bool ``(B or 1, *spatial)``
        - output: ``(B, heads, Cv, |H|, *spatial)``, in the dtype of ``value``

    Source: GE-ViT Eq. 16 (arXiv:2306.06722) for t = s = h, which leaves a softmax over pixels alone; frames of group
    elements in three dimensions: Platonic Transformers (arXiv:2510.03511).
    """
    check_frame_attention(query, key, value, rho_space, neighbourhood, space_bias, dropout, mask)
    query, key, value = (zero_where_hidden(x, mask) for x in (query, key, value))
    return checked_frame_attention(query, key, value, rho_space, neighbourhood, space_bias, dropout, mask)[0]


def checked_frame_attention(
    query, key, value, rho_space, neighbourhood, space_bias=None, dropout=0.0, mask=None, plain=False
) -> tuple[Tensor, Tensor]:
    """:func:`frame_attention` of operands that are known to fit and to hold numbers, as the layers' own do; also the
    logarithms (B, heads, |H|, *spatial) of the sums of exponentials of a window's scores; of all pixels, nothing."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, kind = query.shape[1], value.dtype
    query, key, value, rho_space = (x.to(dtype) for x in (query, key, value, rho_space))
    query = query * query.shape[2] ** -0.5
    bias = rho_space.new_zeros(heads, *rho_space.shape[:2]) if space_bias is None else space_bias.to(dtype)
    if neighbourhood.kernel_size is None:
        out, level = _global(query, key, value, rho_space, bias, mask, dropout), bias.new_zeros(0)
    else:
        table = torch.cat([rho_space.expand(heads, -1, -1, -1), bias.unsqueeze(-1)], -1)
        window = neighbourhood.kernel_size, neighbourhood.selection, neighbourhood.circular, dropout
        scores = query.shape[0] * table[..., 0].numel() * math.prod(query.shape[4:])
        if use_plain(plain):
            attend = plain_frame_attention
        else:  # fused has one tensor of scores, in backward
            attend = fused_frame_attention if compiler_fuses(query, scores // 4) else frame_attention_op
        out, level = attend(query, key, value, table, mask, draw_seed(dropout, query.device), *window)
    return zero_where_hidden(out, mask).to(kind), level


def _global(
    query: Tensor, key: Tensor, value: Tensor, rho_space: Tensor, bias: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """All pixels are keys: images, or heads of one, at a time, as many as fit."""
    (batch, heads), spatial = query.shape[:2], query.shape[4:]
    with full_precision(query.device):
        relative = places_of_pairs(spatial, query.device)
        rho, bias = rho_space[:, relative], bias[..., relative]  # (|H|, N, N, C), (heads, |H|, N, N)
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or batch * bias.numel() <= WHOLE_NUMBERS:
            return _all_pairs(query, key, value, rho, bias, mask, dropout)
        again = torch.is_grad_enabled() and not transformed()
        parts = []
        for chunk in chunks(batch, heads, bias[0].numel(), WHOLE_NUMBERS):
            there = mask if mask is None or len(mask) == 1 else mask[chunk.images]
            part = query[chunk], key[chunk], value[chunk], rho, bias[chunk.heads], there, dropout
            out = checkpoint(_all_pairs, *part, use_reentrant=False) if again else _all_pairs(*part)
            parts.append(out.flatten(0, 1))  # of whole images, or of some heads of one
        return torch.cat(parts).unflatten(0, (batch, heads))


def _all_pairs(
    query: Tensor, key: Tensor, value: Tensor, rho: Tensor, bias: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention of some images and heads, with scores (b, e, |H|, N, N)."""
    q, k, v = (x.flatten(4).transpose(2, 3) for x in (query, key, value))  # (b, e, T, C, N)
    scores = torch.einsum("behci,hijc->behij", q.expand(-1, -1, len(rho), -1, -1), rho) + torch.matmul(q.mT, k) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask.flatten(1)[:, None, None, None], HIDDEN)
    out = torch.matmul(F.dropout(scores.softmax(-1), dropout), v.mT)  # (b, e, |H|, N, Cv)
    return out.permute(0, 1, 4, 2, 3).unflatten(-1, query.shape[4:])


def checked_separable(value: Tensor, space_bias: Tensor, neighbourhood: Neighbourhood, mask: Tensor | None) -> Tensor:
    """Frame attention without content, a grouped convolution: out(i, h) = sum_D softmax_D(b(h^-1 D)) v(i + D, h) of
    values (B, heads, Cv, |H|, *spatial) and biases (heads, |H|, D), with zeros outside of the image.

    Source: Cordonnier et al. (2020), Theorem 1, for attention by places alone; Chollet, Xception (2017), for separable
    convolutions.
    """
    spatial = value.shape[4:]
    with full_precision(value.device):
        weight = space_bias.to(torch.promote_types(space_bias.dtype, torch.float32)).softmax(-1)
    if neighbourhood.kernel_size is None:
        pairs = weight[..., places_of_pairs(spatial, value.device)].to(value.dtype)  # (heads, |H|, N, N)
        out = torch.einsum("ehij,bechj->bechi", pairs, value.flatten(4)).unflatten(-1, spatial)
        return zero_where_hidden(out, mask)
    side, dim = neighbourhood.kernel_size, neighbourhood.dim
    weight = in_square(weight, window(side, neighbourhood.selection, dim), side)  # zeros at the corners of a disk
    filters = weight.to(value.dtype)[:, None].expand(-1, value.shape[2], -1, -1).flatten(0, 2)
    convolve = F.conv2d if dim == 2 else F.conv3d
    x, padding = value.flatten(1, 3), side // 2
    if neighbourhood.circular:
        x, padding = window(side, (), dim).pad(x, circular=True), 0
    out = convolve(x, filters.unflatten(1, (1, *[side] * dim)), padding=padding, groups=len(filters))
    return zero_where_hidden(out.unflatten(1, value.shape[1:4]), mask)
