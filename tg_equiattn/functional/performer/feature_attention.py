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

from ...ranks import merge_attentions
from ..operators import are_few, tile_numbers
from ..tiles import Shape, Tile, is_whole, tiled

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_TILE_SCORES = 1 << 18  # scores of a tile on a CPU, which fit into the cache of a core
_TILE_NODES = 256  # smallest number of nodes of a tile


def feature_summary(
    key: Float[Tensor, "groups nodes d"], bias: Float[Tensor, "groups nodes"], projection: Float[Tensor, "features d"],
    value: Float[Tensor, "groups nodes e"], mask: Bool[Tensor, "groups nodes"] | None,
) -> tuple[Float[Tensor, "groups features e"], Float[Tensor, "groups features"]]:  # fmt: skip
    """The content and the log-sum-exp of each feature over the valid keys of a group.

    Log features are W k + bias. A group without keys has content 0 and the smallest finite key_lse.
    """
    groups, features = key.shape[0], projection.shape[0]  # unlike len, not a constant of torch.jit.trace
    bias = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    tensors = projection.expand(groups, -1, -1), key, bias, value
    if is_whole(key) or are_few(groups * key.shape[1] * features):
        return _averages(None, *tensors)
    cuts = list(_cuts(key, features))
    parts = 1 + max(n for *_, n in cuts)
    tiles = [Tile(None, (group, *((group, nodes),) * 3), ((n, group),) * 2) for group, nodes, n in cuts]
    shapes = Shape((parts, groups, features, value.shape[-1]), True), Shape((parts, groups, features), True)
    content, lse = tiled(_averages, tiles, tensors, shapes, (False, True, True, True))
    if parts == 1:
        return content[0], lse[0]
    content, lse = merge_attentions(content, lse[..., None])
    return content, lse[..., 0]


def feature_readout(
    query: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"],
    content: Float[Tensor, "groups features e"], key_lse: Float[Tensor, "groups features"],
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes"]]:  # fmt: skip
    """Outputs and log-sum-exps of queries over the features."""
    tensors = query, projection.expand(query.shape[0], -1, -1), key_lse, content
    if is_whole(query) or are_few(query[..., 0].numel() * len(projection)):
        return _averages(None, *tensors)
    cuts = [(group, (group, nodes)) for group, nodes, _ in _cuts(query, len(projection))]
    tiles = [Tile(None, (nodes, group, group, group), (nodes, nodes)) for group, nodes in cuts]
    shapes = Shape((*query.shape[:2], content.shape[-1]), True), Shape(query.shape[:2], True)
    out, lse = tiled(_averages, tiles, tensors, shapes, (True, False, False, False))
    return out, lse


def _cuts(nodes: Float[Tensor, "groups nodes d"], features: int) -> Iterator[tuple[slice, slice, int]]:
    """Slices of groups and of their nodes, with the number of the latter among those of their groups."""
    groups, length = nodes.shape[:2]
    budget = tile_numbers(nodes.device, _TILE_SCORES, 4)
    some = max(1, min(groups, budget // (features * min(length, _TILE_NODES))))
    step = max(_TILE_NODES, budget // (some * features))
    for g in range(0, groups, some):
        for n, a in enumerate(range(0, length, step)):
            yield slice(g, g + some), slice(a, a + step), n


def _averages(
    settings: None, left: Float[Tensor, "groups rows d"], right: Float[Tensor, "groups columns d"],
    bias: Float[Tensor, "groups columns"], value: Float[Tensor, "groups columns e"],
) -> tuple[Float[Tensor, "groups rows e"], Float[Tensor, "groups rows"]]:  # fmt: skip
    """Softmax averages of values, and log-sum-exps, in the memory of the scores, left right^T + bias. Where no score is
    finite, they are 0 and the smallest number."""
    scores = torch.baddbmm(bias[:, None], left, right.mT)
    lowest = torch.finfo(scores.dtype).min
    top = scores.detach().amax(-1, keepdim=True).clamp(min=lowest)
    sums = scores.sub_(top).exp_() @ F.pad(value, (0, 1), value=1.0)
    total = sums[..., -1:]
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    return sums[..., :-1] / total, torch.where(empty, lowest, total.log() + top).squeeze(-1)
