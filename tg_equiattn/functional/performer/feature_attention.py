r"""The two halves of attention by random features, tile by tile, in O(N) memory.

With the logarithms u of the features, linear attention consists of two softmax attentions. The m features attend to the
nodes, and then the nodes attend to the features:

    summary   content_m = sum_j softmax_j(u_m(k_j)) v_j,   key_lse_m = logsumexp_j u_m(k_j)
    readout   out_i = sum_m softmax_m(u_m(q_i) + key_lse_m) content_m,   lse_i = logsumexp_m(u_m(q_i) + key_lse_m)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...merging import merge_attentions
from ...modes import is_concrete, runs_eagerly
from ..backend import are_few, tile_numbers
from ..tiles import WHOLE, Shape, Tile, is_whole, tiled

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_TILE_SCORES = 1 << 18  # scores of a tile on a CPU, which fit into the cache of a core
_SAFE = 50.0  # sums of exponentials of scores up to here are finite in float32
_TILE_NODES = 256  # smallest number of nodes of a tile


def feature_summary(
    key: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"], norm: float,
    value: Float[Tensor, "groups nodes e"], mask: Bool[Tensor, "groups nodes"] | None,
) -> tuple[Float[Tensor, "groups features e"], Float[Tensor, "groups features"]]:  # fmt: skip
    """The content and the log-sum-exp of each feature over the valid keys of a group.

    Log features are W k - norm |k|^2. A group without keys has content 0 and the smallest finite key_lse.
    """
    bias = -norm * key.square().sum(-1)
    bias = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    tensors = key, value, bias, projection
    if is_whole(key) or are_few(key[..., 0].numel() * len(projection)):
        return _summary(False, *tensors)
    plain = _is_safe(key, projection, norm)
    cuts = list(_cuts(key, len(projection)))
    parts, size = 1 + max(n for *_, n in cuts), (len(key), len(projection))
    tiles = [Tile(plain, ((group, nodes),) * 3 + (WHOLE,), ((n, group),) * 2) for group, nodes, n in cuts]
    shapes = Shape((parts, *size, value.shape[-1]), True), Shape((parts, *size), True)
    content, lse = tiled(_summary, tiles, tensors, shapes, (True, True, True, False))
    if parts == 1:
        return content[0], lse[0]
    content, lse = merge_attentions(content, lse[..., None])
    return content, lse[..., 0]


def feature_readout(
    query: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"],
    content: Float[Tensor, "groups features e"], key_lse: Float[Tensor, "groups features"],
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes"]]:  # fmt: skip
    """Outputs and log-sum-exps of queries over the features."""
    tensors = query, content, key_lse, projection
    if is_whole(query) or are_few(query[..., 0].numel() * len(projection)):
        return _readout(False, *tensors)
    plain = _is_safe(query, projection, 0.0, key_lse)
    tiles = [
        Tile(plain, ((group, nodes), group, group, WHOLE), ((group, nodes),) * 2)
        for group, nodes, _ in _cuts(query, len(projection))
    ]
    shapes = Shape((*query.shape[:2], content.shape[-1]), True), Shape(query.shape[:2], True)
    out, lse = tiled(_readout, tiles, tensors, shapes, (True, False, False, False))
    return out, lse


@torch.no_grad()
def _is_safe(x: Tensor, projection: Tensor, norm: float, lse: Tensor | None = None) -> bool:
    """True if exponentials of scores need no stabiliser. Reading a bound of the scores costs nothing on a CPU."""
    if not runs_eagerly() or not is_concrete(x) or not x.numel():
        return False
    size, longest = x.square().sum(-1).amax(), projection.square().sum(-1).amax()
    bound = (size * longest).sqrt() + norm * size
    return float(bound if lse is None else bound + lse.abs().amax()) < _SAFE


def _cuts(nodes: Float[Tensor, "groups nodes d"], features: int) -> Iterator[tuple[slice, slice, int]]:
    """Slices of groups and of their nodes, with the number of the latter among those of their groups."""
    groups, length = nodes.shape[:2]
    budget = tile_numbers(nodes.device, _TILE_SCORES, 4)
    some = max(1, min(groups, budget // (features * min(length, _TILE_NODES))))
    step = max(_TILE_NODES, budget // (some * features))
    for g in range(0, groups, some):
        for n, a in enumerate(range(0, length, step)):
            yield slice(g, g + some), slice(a, a + step), n


def _summary(
    plain: bool, key: Float[Tensor, "groups nodes d"], value: Float[Tensor, "groups nodes e"],
    bias: Float[Tensor, "groups nodes"], projection: Float[Tensor, "features d"],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _averages(torch.baddbmm(bias[:, None], projection.expand(key.shape[0], -1, -1), key.mT), value, plain)


def _readout(
    plain: bool, query: Float[Tensor, "groups nodes d"], content: Float[Tensor, "groups features e"],
    key_lse: Float[Tensor, "groups features"], projection: Float[Tensor, "features d"],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _averages(
        torch.baddbmm(key_lse[:, None], query, projection.mT.expand(query.shape[0], -1, -1)), content, plain
    )


def _averages(
    scores: Float[Tensor, "groups rows columns"], value: Float[Tensor, "groups columns e"], plain: bool
) -> tuple[Float[Tensor, "groups rows e"], Float[Tensor, "groups rows"]]:
    """Softmax averages of values, and log-sum-exps, in the memory of the scores. Where no score is finite, they are 0
    and the smallest number."""
    lowest = torch.finfo(scores.dtype).min
    top = torch.zeros_like(scores[..., :1]) if plain else scores.detach().amax(-1, keepdim=True).clamp(min=lowest)
    sums = (scores if plain else scores.sub_(top)).exp_() @ F.pad(value, (0, 1), value=1.0)
    total = sums[..., -1:]
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    return sums[..., :-1] / total, torch.where(empty, lowest, total.log() + top).squeeze(-1)
