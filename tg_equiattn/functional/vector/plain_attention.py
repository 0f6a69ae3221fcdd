"""The definition of vector self-attention in differentiable operations of torch, some queries at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import tile_numbers
from ..chunks import map_chunks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_BLOCK_PAIRS = 1 << 18  # pairs of a chunk on a CPU; the definition has some 16 numbers for each


def valid_tokens(lengths: Int[Tensor, " groups"] | None, length: int) -> Bool[Tensor, "groups {length}"] | None:
    """A mask of the tokens within their sequence's own length; None if ``lengths`` are None."""
    return None if lengths is None else torch.arange(length, device=lengths.device) < lengths[:, None]


def plain_vector_attention(
    q: Float[Tensor, "groups tokens 3"],
    k: Float[Tensor, "groups tokens 3"],
    v: Float[Tensor, "groups tokens 3"],
    lengths: Int[Tensor, " groups"] | None,
    scale: Float[Tensor, " groups"],
) -> Float[Tensor, "groups tokens 3"]:
    """sum_j p_ij (q_i x k_j) x v_j of sequences that are zero beyond their own lengths."""

    def of_queries(q: Tensor) -> Tensor:
        return _of_queries(q.transpose(0, 1), k, v, lengths, scale).transpose(0, 1)

    step = max(1, tile_numbers(k.device, _BLOCK_PAIRS, 16) // max(1, k[..., 0].numel()))
    with full_precision(q.device):
        return map_chunks(of_queries, step, (q.transpose(0, 1),)).transpose(0, 1)


def _of_queries(
    q: Float[Tensor, "groups some 3"],
    k: Float[Tensor, "groups tokens 3"],
    v: Float[Tensor, "groups tokens 3"],
    lengths: Int[Tensor, " groups"] | None,
    scale: Float[Tensor, " groups"],
) -> Float[Tensor, "groups some 3"]:
    q, k, v = (x.movedim(-1, 0).contiguous() for x in (q, k, v))
    cross = torch.linalg.cross(q[..., :, None], k[..., None, :], dim=0)
    square = cross.square().sum(0)
    # The cross product of parallel q and k is rounding, of any direction, and must have no derivative.
    sizes = q.square().sum(0)[..., :, None] * k.square().sum(0)[..., None, :]
    differ = square > (4 * torch.finfo(q.dtype).eps) ** 2 * sizes
    score = torch.where(differ, torch.where(differ, square, 1.0).sqrt(), 0.0) * scale[:, None, None]
    valid = valid_tokens(lengths, k.shape[-1])
    if valid is not None:
        score = score.masked_fill(~valid[:, None], torch.finfo(q.dtype).min)
    return torch.linalg.cross(score.softmax(-1) * cross, v[..., None, :], dim=0).sum(-1).movedim(0, -1)
