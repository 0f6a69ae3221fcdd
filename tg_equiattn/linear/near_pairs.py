"""Attention with near pairs: an exact window beside random features or all pairs, and weights of clipped distances."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graphs.edge_products import edge_dot, edge_sum
from ..graphs.edges import CSR, whole_offsets
from ..graphs.neighbors import NeighborList
from ..graphs.node_batch import NodeBatch, PaddedBatch, Parts
from ..shapes import Bool, Float, Int
from ..softmax_attention import softmax_attention
from ..tiles import joined
from .linear_attention import Inputs, complete_lse, drop_keys, feature_readout, linear_attention

_DENSE_NODES, _DENSE_SCORES = 128, 1 << 24  # graphs of up to so many nodes, and scores in all, are faster dense
_LOG_ZERO = -1e4  # finite number in place of the logarithm of zero
_PADDING = 1 << 15  # scores of padding that take less time than one more group of graphs
_FLOOR = 1e-30  # smallest weight of a distance, relative to the largest one: float32 rounds smaller ones to zero


class Near(NamedTuple):
    """Terms of near pairs in attention.

    Attributes:
        pairs: the near pairs.
        bias: bias of each near pair.
        self_bias: bias of each node with itself, or one for all nodes.
        far_bias: bias of all pairs.
        values: terms of the values of near pairs: features of pairs, features of a node with itself, and the map from
            features to values. ``None`` means no such terms.
    """

    pairs: NeighborList
    bias: Float[Tensor, "heads pairs"]
    self_bias: Float[Tensor, "heads nodes"]
    far_bias: Float[Tensor, " heads"]
    values: tuple[Float[Tensor, "pairs r"], Float[Tensor, " r"], Float[Tensor, "heads r e"]] | None = None

    def feature_sums(self, weights: Float[Tensor, "heads pairs"]) -> Float[Tensor, "heads nodes r"]:
        """Weighted sums of the features of the pairs of each node."""
        features = cast("tuple[Tensor, ...]", self.values)[0]
        relation, entries = self.pairs.cached(_incidence, len(weights))
        sums = edge_sum(weights.flatten()[None].index_select(1, entries), features[None], relation)
        return sums[0].unflatten(0, (-1, len(weights))).transpose(0, 1)

    def added_values(
        self, sums: Float[Tensor, "heads nodes r"], self_weights: Float[Tensor, "heads nodes 1"]
    ) -> Float[Tensor, "heads nodes e"]:
        """Weighted sums of ``values``, from those of :meth:`feature_sums` and the weight of each node with itself."""
        _, itself, mapped = cast("tuple[Tensor, ...]", self.values)
        return (sums + self_weights * itself) @ mapped


def _incidence(pairs: NeighborList, heads: int) -> tuple[CSR, Int[Tensor, " entries"]]:
    """A sparse matrix that adds the features of pairs up for each node and head, and the weight of each entry.

    Rows are node * heads + head, and columns are pairs; a row has an entry for each pair with this node as target. The
    second result is the index of each entry in the weights of pairs (heads, E), flattened.
    """
    row, row_starts, count = pairs.target, pairs.csr.row_starts, pairs.offsets.shape[0]
    node = row.repeat_interleave(heads, output_size=heads * count)
    first, degree = row_starts[:-1][node], row_starts.diff()[node]
    within = torch.arange(heads * count, device=row.device) - heads * first  # entries go by node, head, pair
    head, pair = within // degree, first + within % degree
    each = torch.arange(count, device=row.device)
    first, degree = row_starts[:-1][row], row_starts.diff()[row]
    along = torch.arange(heads, device=row.device)
    order = (heads * first + each - first)[:, None] + along * degree[:, None]  # by pair, then head
    pattern = CSR.from_sorted(node * heads + head, pair, heads * pairs.nodes, count, order.flatten())
    return pattern, head * count + pair


def window_attention(inputs: Inputs, near: Near, node_batch: NodeBatch) -> Float[Tensor, "heads nodes e"]:
    r"""Attention with exact softmax weights for near pairs, and random features for all pairs.

    .. math:: w_{ij} = e^{f} \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i] \exp\big(\langle q_i, k_j \rangle / \sqrt d + b(x_j - x_i)\big), \qquad
        \mathrm{out}_i = \sum_j w_{ij} v_j \Big/ \sum_j w_{ij}

    A node is always near itself. Weights are positive. Without a projection, the weight of a pair in the first term is
    :math:`\exp(\langle q_i, k_j \rangle / \sqrt d)` itself, for all pairs of a graph.
    """
    query, far_bias, pairs = inputs.query, near.far_bias[:, None, None], near.pairs
    if inputs.projection is None and (
        pairs.sums is None
        and pairs.repeats is False  # or not known, None
        and node_batch.bound <= _DENSE_NODES
        and node_batch.count * query.shape[0] * node_batch.bound**2 <= _DENSE_SCORES
    ):
        return dense_attention(inputs, near, node_batch)
    out, lse = near_attention(inputs, near)
    if inputs.projection is None:
        far = pair_attention(inputs, node_batch, lse - far_bias)
        return torch.addcmul(far[..., :-1], far[..., -1:], out)
    far, far_lse = linear_attention(inputs, node_batch)
    far_lse = complete_lse(far_lse + far_bias, query, inputs.projection)
    return torch.lerp(far, out, (lse - far_lse).sigmoid())


def near_attention(inputs: Inputs, near: Near) -> tuple[Float[Tensor, "heads nodes e"], Float[Tensor, "heads nodes 1"]]:
    """Softmax averages over the near pairs of each node and the node itself, and log-sum-exps."""
    pairs, query, key, value = near.pairs, inputs.query * inputs.query.shape[-1] ** -0.5, inputs.key, inputs.value
    self_scores = (query * key).sum(-1) + near.self_bias
    scores = edge_dot(query, key, pairs) + near.bias
    if inputs.key_bias is not None:
        key_bias = inputs.key_bias.squeeze(-1)
        self_scores, scores = self_scores + key_bias, scores + key_bias.index_select(1, pairs.source)
    if pairs.mask is not None:
        scores = scores.masked_fill(~pairs.mask, -torch.inf)
    target = pairs.target.expand_as(scores)
    top = self_scores.detach().scatter_reduce(1, target, scores.detach(), "amax")
    weights, self_weights = (scores - top.index_select(1, pairs.target)).exp(), (self_scores - top).exp()
    total = self_weights.scatter_add(1, target, weights)
    lse, dropout = (total.log() + top)[..., None], inputs.dropout
    if pairs.sums is None:
        weights = F.dropout(weights, dropout) if dropout else weights
        out, features = edge_sum(weights, value, pairs), None if near.values is None else near.feature_sums(weights)
    else:  # sums of softmax weights, some of which may be left out there
        weights, self_weights = weights / total.index_select(1, pairs.target), self_weights / total
        out, features, kept = pairs.sums(pairs, weights, value, near.values, dropout)
        total = (kept + self_weights).clamp(min=torch.finfo(kept.dtype).tiny)
        lse = lse + total.log()[..., None]
    self_weights = (F.dropout(self_weights, dropout) if dropout else self_weights)[..., None]
    out = torch.addcmul(out, self_weights, value)
    out = out if features is None else out + near.added_values(features, self_weights)
    return out / total[..., None], lse


def pair_attention(
    inputs: Inputs, node_batch: NodeBatch, extra: Float[Tensor, "heads nodes 1"] | None = None
) -> Float[Tensor, "heads nodes channels"]:
    """Softmax attention over all pairs of each graph, with dropout of weights, in linear memory.

    With ``extra``, each query has one more key, with this score and value zero. Its weight, which is never dropped, is
    one more channel of the result.
    """
    query, key, value = inputs[:3]
    heads = len(query)
    parts, outs = node_batch.parts(worth=_PADDING // heads), []
    query = query * query.shape[-1] ** -0.5
    query = query if extra is None else torch.cat([query, extra], -1)
    for rows, some in zip(parts.rows, parts.pack_together((query, key, value), 1), strict=True):
        mask = None if rows.mask is None else rows.mask.repeat(heads, 1)
        q, k, v = [x.flatten(0, 1) for x in some]
        outs.append(softmax_attention(q, k, v, mask, inputs.dropout).unflatten(0, (heads, -1)))
    return parts.unpack(outs, 1)


def dense_attention(inputs: Inputs, near: Near, node_batch: NodeBatch) -> Float[Tensor, "heads nodes e"]:
    r"""One softmax over all pairs of small graphs, whose scores are matrices: :math:`\log(1 + e^{b - f})` is added to
    those of near pairs."""
    query = inputs.query * inputs.query.shape[-1] ** -0.5
    parts = node_batch.parts(worth=_PADDING // len(query))
    index, logs = _near_entries(near, parts)
    added = F.softplus(logs, threshold=40)  # the logarithm beyond it is exact
    masked = [_scores_of_keys(rows, query) for rows in parts.rows]
    scores = joined(masked).expand(len(query), -1).scatter_add(1, index.expand_as(added), added)
    packed = parts.pack_together((query, inputs.key, inputs.value), 1)
    weights, outs = [], []
    for (q, k, v), bias in zip(packed, scores.split([len(x) for x in masked], 1), strict=True):
        weight = F.dropout((q @ k.mT + bias.view(*q.shape[:3], -1)).softmax(-1), inputs.dropout)
        outs.append(weight @ v)
        weights.append(weight.flatten(1))
    out = parts.unpack(outs, 1)
    if near.values is None:
        return out
    shares = joined(weights, 1).index_select(1, index) * (logs - added).exp()  # the near terms in weights
    pair_weights, self_weights = shares.split([near.bias.shape[1], near.pairs.nodes], 1)
    return out + near.added_values(near.feature_sums(pair_weights), self_weights[..., None])


def _near_entries(near: Near, parts: Parts) -> tuple[Int[Tensor, " entries"], Float[Tensor, "heads entries"]]:
    """The near pairs, followed by the pairs of each node with itself: their index among the scores of a head, of all
    rows (length, length), one after the other; and b - f."""
    pairs, bias, (first, place) = near.pairs, near.bias, parts.scores()
    if pairs.mask is not None:
        bias = bias.masked_fill(~pairs.mask, -torch.inf)
    logs = torch.cat([bias, near.self_bias.expand(-1, pairs.nodes)], 1) - near.far_bias[:, None]
    index = torch.cat([first.index_select(0, pairs.target) + place.index_select(0, pairs.source), first + place])
    return index, logs.clamp(min=_LOG_ZERO)  # finite, so derivatives of exp are finite


def _scores_of_keys(rows: PaddedBatch, x: Tensor) -> Float[Tensor, " scores"]:
    """Zero for the scores of keys, and a large negative number for those of padding."""
    if rows.mask is None:
        return x.new_zeros(rows.count * rows.length**2)
    masked = (rows.mask.to(x.dtype) - 1) * (torch.finfo(x.dtype).max / 2)
    return masked[:, None].expand(-1, rows.length, -1).flatten()


def clipped_attention(
    inputs: Inputs, distance_table: Float[Tensor, "heads distances d"], pairs: NeighborList, node_batch: NodeBatch
) -> Float[Tensor, "heads nodes e"]:
    r"""Attention whose weights depend only on the query and on the clipped distance of a pair (strategy 2); it uses no
    keys.

    The table w of each head has a row for each of the distances 0 to k. The weight of a pair at Manhattan distance d is
    :math:`a_{id} = \langle \phi(q_i), \phi(w_d) \rangle`; all distances from k on share :math:`a_{ik}`. With the sums
    :math:`R_d` of the values at each distance,

    .. math:: \mathrm{out}_i = \frac{a_{ik} \sum_j v_j + \sum_{d<k} (a_{id} - a_{ik})\, R_d(i)}
        {a_{ik} n + \sum_{d<k} (a_{id} - a_{ik})\, |R_d(i)|}, \qquad R_d(i) = \sum_{j:\, d(i,j) = d} v_j

    Where no node is distant, :math:`a_{ik}` is zero. Weights are at least 1e-30 times the largest one of the query.
    Pairs at distance k or more are ignored, and no pair may be given twice. Source: relative-performer section 2.3,
    strategy 2.
    """
    query, value, root = inputs.query, drop_keys(inputs.value, inputs.dropout), inputs.query.shape[-1] ** -0.25
    index, near, counts = pairs.cached(near_distances, distance_table.shape[1] - 1)
    w, table = cast(Tensor, inputs.projection), distance_table.to(query.dtype) * root
    logs = table @ w.T - table.square().sum(-1, keepdim=True) / 2
    top = logs.detach().amax(1)
    content = (logs - top[:, None]).exp().mT.contiguous()
    weights = feature_readout(query, w * root, content, top[..., None])[0].clamp(min=_FLOOR)
    far_count = node_batch.spread(node_batch.sizes)[:, None] - counts.sum(1, keepdim=True)
    counts = torch.cat([counts, far_count], 1)
    weights = torch.where(counts > 0, weights, 0.0)
    weights = weights / weights.detach().amax(-1, keepdim=True)
    far, excess = weights[..., -1:], weights[..., :-1] - weights[..., -1:]
    pair_weights = excess.flatten(1).index_select(1, index) * near.to(query.dtype)
    everything = node_batch.spread(node_batch.sum(value.transpose(0, 1))).transpose(0, 1)
    numerator = far * everything + excess[..., :1] * value + edge_sum(pair_weights, value, pairs)
    return numerator / (weights * counts).sum(-1, keepdim=True)


def near_distances(
    pairs: NeighborList, distances: int
) -> tuple[Int[Tensor, " pairs"], Bool[Tensor, " pairs"], Int[Tensor, "nodes distances"]]:
    """Flat index (target, distance) of each pair, by Manhattan distance; mask of pairs that are not masked and nearer
    than ``distances``; number of nodes at each distance from each node, itself included."""
    if pairs.repeats:
        raise ValueError(
            "edge_index must not join a pair twice with position='clipped', got a pair twice: two nodes have one "
            "distance; see torch_geometric.utils.coalesce"
        )
    distance = whole_offsets(pairs.offsets, name="offsets (edge_offset)").abs().sum(-1).long()
    near = (distance >= 0) & (distance < distances)  # sums of huge integers wrap around
    near = near if pairs.mask is None else near & pairs.mask
    index = pairs.target * distances + torch.where(near, distance, 0)
    itself = (torch.arange(pairs.nodes * distances, device=index.device) % distances == 0).long()
    return index, near, itself.index_add(0, index, near.long()).view(-1, distances)
