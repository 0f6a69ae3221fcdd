r"""Linear attention: softmax attention estimated by positive orthogonal random features (FAVOR+), in O(N) memory.

Directions w with variance s give the features of x, which is a query or key divided by d^(1/4):

    phi_m(x) = s^(d/4) / sqrt(m) exp(sqrt(s) <w_m, x> + (1 - s) |w_m|^2 / 4 - |x|^2 / 2),  E phi(q) phi(k) = exp(q k)

The expectation is the same for every s > 1/2. With s = 1 the features are those of FAVOR+; with a larger s the error of
large queries and keys is smaller.

With the logarithms u of the features, linear attention consists of two softmax attentions. The m features attend to the
nodes, and then the nodes attend to the features:

    summary   content_m = sum_j softmax_j(u_m(k_j)) v_j,   key_lse_m = logsumexp_j u_m(k_j)
    readout   out_i = sum_m softmax_m(u_m(q_i) + key_lse_m) content_m,   lse_i = logsumexp_m(u_m(q_i) + key_lse_m)

The maximum that is subtracted before exponentials is that of one graph, head and feature (keys) or of one query. So
other graphs of the batch have no effect, no epsilon is needed, and vectors of norm 100 do not overflow.

Sources: Choromanski et al., Rethinking attention with Performers (2021), Eq. 5 and Lemma 1; Likhosherstov et al.,
Chefs' random tables (2022), FAVOR++, for the variance (A = (1 - s) / 4 there).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graphs.node_batch import NodeBatch, PaddedBatch, Parts, Slots
from ..operators import are_few, tile_numbers
from ..shapes import Bool, Float, Int
from ..tiles import Shape, Tile, tiled
from ..torch_state import is_traced, is_whole

_TILE_SCORES = 1 << 18  # scores of a tile on a CPU, which fit into the cache of a core
_TILE_NODES = 256  # smallest number of nodes of a tile
_SHORTEST_ROW = 16  # slots of a row, where a graph takes several


def log_weights(projection: Float[Tensor, "features d"], variance: Float[Tensor, ...]) -> Tensor:
    """Logarithms (..., features) of the importance weights of directions that are drawn with a variance."""
    s = variance[..., None]
    return torch.addcmul(s.log() * (projection.shape[1] / 2), s - 1, projection.square().sum(1), value=-0.5)


class Inputs(NamedTuple):
    """The inputs of attention among nodes.

    Attributes:
        query: queries.
        key: keys.
        value: values.
        projection: directions of the random features; ``None`` for exact weights of all pairs.
        variance: variance of the directions for each head, as above; ``None`` means 1.
        key_bias: number that is added to all scores of a key. Exact weights do not use it.
        dropout: probability of dropping a weight of a near pair or of an exact softmax, or a key of all pairs.
    """

    query: Float[Tensor, "heads nodes d"]
    key: Float[Tensor, "heads nodes d"]
    value: Float[Tensor, "heads nodes e"]
    projection: Float[Tensor, "features d"] | None = None
    variance: Float[Tensor, " heads"] | None = None
    key_bias: Float[Tensor, "heads nodes 1"] | None = None
    dropout: float = 0.0

    def wide(self) -> Inputs:
        """The same inputs in float32, or in float64 if queries are. All attention here runs so, without autocast."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        tensors: dict[str, Any] = {n: x.to(dtype) for n, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**tensors)


def linear_attention(
    inputs: Inputs, node_batch: NodeBatch
) -> tuple[Float[Tensor, "heads nodes e"], Float[Tensor, "heads nodes 1"]]:
    """Attention by random features among the nodes of each graph, and the log-sum-exps of the estimated scores, to
    complete by :func:`complete_lse`."""
    heads, parts, merge, variance = inputs.query.shape[0], graph_rows(node_batch), None, inputs.variance
    (rows,) = parts.rows
    if rows.graph is not None:
        merge = functools.partial(_merge_rows, graph=rows.graph, graphs=node_batch.count)
    tensors = inputs.query, inputs.key, drop_keys(inputs.value, inputs.dropout), inputs.key_bias
    (packed,) = parts.pack_together([x for x in tensors if x is not None], 1)
    query, key, value, *key_bias = [x.flatten(0, 1) for x in packed]
    if variance is not None:
        variance = variance[:, None].expand(-1, query.shape[0] // heads).flatten()
    operands = Inputs(query, key, value, inputs.projection, variance, key_bias[0] if key_bias else None)
    results = feature_attention(operands, rows.mask, merge)
    out, lse = parts.unpack_together([x.unflatten(0, (heads, -1)) for x in results], 1)
    return out, lse


def graph_rows(node_batch: NodeBatch) -> Parts:
    """Rows of whole graphs, or of parts of graphs if most graphs are much shorter than the longest one, or if no bound
    of their sizes is known. Parts have the ``graph`` of each row."""
    average = max(1, node_batch.nodes // max(1, node_batch.count))
    known = node_batch.longest is not None and (node_batch.known_sizes is not None or not is_traced())
    if node_batch.even or (known and node_batch.bound <= 2 * average):
        return node_batch.padded()
    length = max(_SHORTEST_ROW, average if known else -(-average // 4))
    count = node_batch.nodes // length + node_batch.count  # a bound of their number
    empty = -node_batch.sizes % length  # slots after the nodes of each graph
    slot = node_batch.sorted_index + (empty.cumsum(0) - empty).index_select(0, node_batch.batch)
    each = torch.arange(node_batch.nodes, device=slot.device)
    node = slot.new_full((count * length,), -1).scatter(0, slot, each)
    filled, node = node >= 0, node.clamp(min=0)
    graph = F.pad(node_batch.batch, (0, 1)).index_select(0, node[::length])  # there may be no nodes
    rows = PaddedBatch(node_batch, count, length, filled.view(-1, length), graph)
    return Parts([rows], Slots(node, filled, slot, None))


def _merge_rows(
    sums: Float[Tensor, "heads*rows features e+1"], top: Float[Tensor, "heads*rows features 1"],
    graph: Int[Tensor, " rows"], graphs: int,
) -> tuple[Float[Tensor, "heads*rows features e+1"], Float[Tensor, "heads*rows features 1"]]:  # fmt: skip
    """From the :func:`_exp_sums` over the keys of each row, those over whole graphs, for each row."""
    sums, top = (x.unflatten(0, (-1, graph.shape[0])) for x in (sums, top))
    most = top.new_full((top.shape[0], graphs, *top.shape[2:]), torch.finfo(top.dtype).min)
    most = most.scatter_reduce(1, graph.view(-1, 1, 1).expand_as(top), top, "amax").index_select(1, graph)
    sums = sums * (top - most).exp()
    sums = sums.new_zeros(sums.shape[0], graphs, *sums.shape[2:]).index_add(1, graph, sums).index_select(1, graph)
    return sums.flatten(0, 1), most.flatten(0, 1)


def drop_keys(value: Float[Tensor, "heads nodes e"], dropout: float) -> Float[Tensor, "heads nodes e"]:
    """Values with dropout of whole keys of each head: their weights stay in the normaliser."""
    return value * F.dropout(torch.ones_like(value[..., :1]), dropout) if dropout else value


def complete_lse(
    lse: Float[Tensor, "... 1"], query: Float[Tensor, "... d"], projection: Float[Tensor, "features d"]
) -> Float[Tensor, "... 1"]:
    """Log-sum-exps with the term of a query's log features that is the same for all features."""
    square = query.square().sum(-1, keepdim=True)
    return torch.sub(lse - math.log(projection.shape[0]), square, alpha=query.shape[-1] ** -0.5 / 2)


def feature_attention(
    inputs: Inputs, mask: Bool[Tensor, "rows nodes"] | None,
    merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes 1"]]:  # fmt: skip
    """Outputs and log-sum-exps of groups of queries, over the valid keys of each group.

    Args:
        inputs: the inputs, with groups in place of heads; ``dropout`` is not used.
        mask: true for valid keys, of groups or of rows that are the last axis of groups; ``None`` means all.
        merge: function for queries that attend to the keys of several groups. It takes the :func:`_exp_sums` over the
            keys of each group, and returns those over all keys that the queries of each group attend to.
    """
    query, key, value, projection, variance, bias, _ = inputs
    directions, scale = cast(Tensor, projection), query.shape[-1] ** -0.5
    w = directions * math.sqrt(scale)  # scaled instead of queries and keys
    square = key.square().sum(-1, keepdim=True)
    bias = square * (-scale / 2) if bias is None else torch.sub(bias, square, alpha=scale / 2)
    if variance is not None:
        root = variance.sqrt()[:, None, None]
        query, key = query * root, key * root
    sums, top = feature_sums(key, bias, w, value, mask)
    content, lse = _divided(*((sums, top) if merge is None else merge(sums, top)))
    lse = lse if variance is None else lse + log_weights(directions, variance)[..., None]
    return feature_readout(query, w, content, lse)


def feature_sums(
    key: Float[Tensor, "groups nodes d"], bias: Float[Tensor, "groups nodes 1"],
    projection: Float[Tensor, "features d"], value: Float[Tensor, "groups nodes e"],
    mask: Bool[Tensor, "rows nodes"] | None,
) -> tuple[Float[Tensor, "groups features e+1"], Float[Tensor, "groups features 1"]]:  # fmt: skip
    """The :func:`_exp_sums` of each feature over the valid keys of a group. Log features are W k + bias."""
    groups, features = key.shape[0], projection.shape[0]  # unlike len, not a constant of torch.jit.trace
    if mask is not None and bias.numel():  # no groups have no number of rows
        bias = bias.unflatten(0, (-1, mask.shape[0])).masked_fill(~mask[..., None], -torch.inf).flatten(0, 1)
    tensors = projection.expand(groups, -1, -1), key, bias, value
    if is_whole(key) or are_few(groups * key.shape[1] * features, key.device):
        return _exp_sums(None, *tensors)
    cuts = list(_cuts(key, features))
    parts = 1 + max(n for *_, n in cuts)
    tiles = [Tile(None, (group, *((group, nodes),) * 3), ((n, group),) * 2) for group, nodes, n in cuts]
    shapes = tuple(Shape((parts, groups, features, width), True) for width in (value.shape[-1] + 1, 1))
    sums, top = tiled(_exp_sums, tiles, tensors, shapes, (False, True, True, True))
    top = top.detach()
    if parts == 1:
        return sums[0], top[0]
    most = top.amax(0)
    return (sums * (top - most).exp()).sum(0), most


def feature_readout(
    query: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"],
    content: Float[Tensor, "groups features e"], key_lse: Float[Tensor, "groups features 1"],
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes 1"]]:  # fmt: skip
    """Outputs and log-sum-exps of queries over the features."""
    tensors = query, projection.expand(query.shape[0], -1, -1), key_lse, content
    if is_whole(query) or are_few(query[..., 0].numel() * len(projection), query.device):
        return _softmax_means(None, *tensors)
    cuts = [(group, (group, nodes)) for group, nodes, _ in _cuts(query, len(projection))]
    tiles = [Tile(None, (nodes, group, group, group), (nodes, nodes)) for group, nodes in cuts]
    shapes = tuple(Shape((*query.shape[:2], width), True) for width in (content.shape[-1], 1))
    out, lse = tiled(_softmax_means, tiles, tensors, shapes, (True, False, False, False))
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


def _exp_sums(
    settings: None, left: Float[Tensor, "groups rows d"], right: Float[Tensor, "groups columns d"],
    bias: Float[Tensor, "groups columns 1"], value: Float[Tensor, "groups columns e"],
) -> tuple[Float[Tensor, "groups rows e+1"], Float[Tensor, "groups rows 1"]]:  # fmt: skip
    """Sums of exp(score - top) times values, and times 1, and the largest scores, top. Scores are left right^T + bias,
    exponentiated in place. Where no score is finite, sums are 0, and top is the smallest number."""
    scores = torch.baddbmm(bias.mT, left, right.mT)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    return scores.sub_(top).exp_() @ F.pad(value, (0, 1), value=1.0), top


def _divided(
    sums: Float[Tensor, "groups rows e+1"], top: Float[Tensor, "groups rows 1"]
) -> tuple[Float[Tensor, "groups rows e"], Float[Tensor, "groups rows 1"]]:
    """Softmax averages and log-sum-exps from :func:`_exp_sums`. Where no score is finite, they are 0 and the smallest
    number."""
    out, total = sums.split([sums.shape[-1] - 1, 1], -1)
    total = F.threshold(total, 0.0, 1.0)
    return out / total, total.log() + top


def _softmax_means(settings: None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax averages of values and log-sum-exps, from the arguments of :func:`_exp_sums`."""
    return _divided(*_exp_sums(settings, *tensors))
