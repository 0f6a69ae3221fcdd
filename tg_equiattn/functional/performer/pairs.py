"""Softmax attention over all pairs of each graph: exact, where random features are an estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...edges import CSR
from ...modes import full_precision
from ...neighbors import NeighborList, SortedPairs
from ...node_batch import NodeBatch, PaddedBatch, Parts
from ..edge_products import edge_dot, edge_sum
from ..softmax_attention import softmax_attention
from ..tiles import joined

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_SCORES = 1 << 32  # largest number of scores of all heads of one graph; they would take 16 GiB in float32
_DENSE_NODES, _DENSE_SCORES = 128, 1 << 24  # graphs of up to so many nodes, and scores in all, are faster dense
_LOG_ZERO = -1e4  # finite number in place of the logarithm of zero
_PADDING = 1 << 15  # scores of padding that take less time than one more group of graphs


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

    def added_values(
        self, weights: Float[Tensor, "heads pairs"], own: Float[Tensor, "heads nodes 1"]
    ) -> Float[Tensor, "heads nodes e"]:
        """Weighted sums of ``values``, by weights of pairs and of nodes with themselves."""
        features, itself, mapped = (t.to(weights.dtype) for t in cast("tuple[Tensor, ...]", self.values))
        relation, entries = self.pairs.cached(_incidence, len(weights))
        sums = edge_sum(weights.flatten()[None].index_select(1, entries), features[None], relation)
        return (sums[0].unflatten(0, (-1, len(weights))).transpose(0, 1) + own * itself) @ mapped


def _incidence(pairs: SortedPairs, heads: int) -> tuple[CSR, Int[Tensor, " entries"]]:
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


def pair_attention_impl(
    query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "heads nodes d"], value: Float[Tensor, "heads nodes e"],
    node_batch: NodeBatch, dropout: float = 0.0, extra: Float[Tensor, "heads nodes 1"] | None = None,
) -> Float[Tensor, "heads nodes channels"]:  # fmt: skip
    """Softmax attention over all pairs of each graph without checks, with dropout of weights.

    With ``extra``, each query has one more key, with this score and value zero. Its weight, which is never dropped, is
    one more channel of the result.

    Raises:
        ValueError: if one graph has more than 2^32 scores.
    """
    heads, length = query.shape[0], max(1, node_batch.bound)
    if heads * length**2 > MAX_SCORES:
        raise ValueError(
            f"method='pairs' must have at most {MAX_SCORES} scores a graph (16 GiB in float32), got {heads} heads of "
            f"{length} nodes: pass method='features' (in RelativeGPSBlock: attn_kwargs={{'method': 'features'}})"
        )
    with full_precision(query.device):
        dtype, parts = torch.promote_types(query.dtype, torch.float32), node_batch.parts(worth=_PADDING // heads)
        q, k, v = (x.to(dtype) for x in (query, key, value))
        q = q * q.shape[-1] ** -0.5
        q = q if extra is None else torch.cat([q, extra], -1)
        outs = []
        for rows, *some in zip(parts.rows, *(parts.pack(x, 1) for x in (q, k, v)), strict=True):
            mask = None if rows.mask is None else rows.mask.repeat(heads, 1)
            q, k, v = (x.flatten(0, 1) for x in some)
            outs.append(softmax_attention(q, k, v, mask, dropout).unflatten(0, (heads, -1)))
        return parts.unpack(outs, 1).to(value.dtype)


def near_attention(
    query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "heads nodes d"], value: Float[Tensor, "heads nodes e"],
    near: Near, dropout: float = 0.0, key_bias: Float[Tensor, "heads nodes 1"] | None = None,
) -> tuple[Float[Tensor, "heads nodes e"], Float[Tensor, "heads nodes 1"]]:  # fmt: skip
    """Softmax averages over the near pairs of each node and the node itself, with dropout of weights; and
    log-sum-exps."""
    pairs, query = near.pairs, query * query.shape[-1] ** -0.5
    own = (query * key).sum(-1) + near.self_bias.to(query.dtype)
    scores = edge_dot(query, key, pairs) + near.bias.to(query.dtype)
    if key_bias is not None:
        bias = key_bias.to(query.dtype).squeeze(-1)
        own, scores = own + bias, scores + bias.index_select(1, pairs.source)
    if pairs.mask is not None:
        scores = scores.masked_fill(~pairs.mask, -torch.inf)
    if pairs.weights is not None:
        scores = scores.masked_fill(pairs.weights <= 0, -torch.inf)
    target = pairs.target.expand_as(scores)
    top = own.detach().scatter_reduce(1, target, scores.detach(), "amax")
    weights, own = (scores - top.index_select(1, pairs.target)).exp(), (own - top).exp()
    weights = weights if pairs.weights is None else weights * pairs.weights.to(weights.dtype)
    total = own.scatter_add(1, target, weights)
    lse = (total.log() + top)[..., None]
    if dropout:
        weights, own = F.dropout(weights, dropout), F.dropout(own, dropout)
    out = torch.addcmul(edge_sum(weights, value, pairs), own[..., None], value)
    if near.values is not None:
        out = out + near.added_values(weights, own[..., None])
    return out / total[..., None], lse


def is_small(near: Near, node_batch: NodeBatch) -> bool:
    """True if :func:`dense_attention` is faster than two softmaxes."""
    if near.pairs.repeats is not False:  # or not known
        return False
    scores = len(near.bias) * node_batch.count * node_batch.bound**2
    return node_batch.bound <= _DENSE_NODES and scores <= _DENSE_SCORES


def dense_attention(
    query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "heads nodes d"], value: Float[Tensor, "heads nodes e"],
    near: Near, node_batch: NodeBatch, dropout: float,
) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
    r"""One softmax over all pairs, whose scores are matrices: :math:`\log(1 + e^{b - f})` is added to those of near
    pairs."""
    parts = node_batch.parts(worth=_PADDING // len(query))
    index, logs = _near_entries(near, parts, query.dtype)
    added = F.softplus(logs, threshold=40)  # the logarithm beyond it is exact
    masked = [_scores_of_keys(rows, query) for rows in parts.rows]
    scores = joined(masked).expand(len(query), -1).scatter_add(1, index.expand_as(added), added)
    given = (parts.pack(x, 1) for x in (query * query.shape[-1] ** -0.5, key, value))
    weights, outs = [], []
    for q, k, v, bias in zip(*given, scores.split([len(x) for x in masked], 1), strict=True):
        weight = F.dropout((q @ k.mT + bias.view(*q.shape[:3], -1)).softmax(-1), dropout)
        outs.append(weight @ v)
        weights.append(weight.flatten(1))
    out = parts.unpack(outs, 1)
    if near.values is None:
        return out
    shares = joined(weights, 1).index_select(1, index) * (logs - added).exp()  # the near terms in weights
    of_pairs, own = shares.split([near.bias.shape[1], near.pairs.nodes], 1)
    return out + near.added_values(of_pairs, own[..., None])


def _near_entries(
    near: Near, parts: Parts, dtype: torch.dtype
) -> tuple[Int[Tensor, " entries"], Float[Tensor, "heads entries"]]:
    """The near pairs, followed by the pairs of each node with itself: their index among the scores of a head, of all
    rows (length, length), one after the other; and b - f."""
    pairs, (first, place) = near.pairs, parts.scores()
    bias, itself, far = (t.to(dtype) for t in (near.bias, near.self_bias, near.far_bias))
    if pairs.weights is not None:
        weights = pairs.weights.to(dtype)
        bias = (bias + torch.where(weights > 0, weights, 1.0).log()).masked_fill(weights <= 0, -torch.inf)
    if pairs.mask is not None:
        bias = bias.masked_fill(~pairs.mask, -torch.inf)
    logs = torch.cat([bias, itself.expand(-1, pairs.nodes)], 1) - far[:, None]
    index = torch.cat([first.index_select(0, pairs.target) + place.index_select(0, pairs.source), first + place])
    return index, logs.clamp(min=_LOG_ZERO)  # finite, so derivatives of exp are finite


def _scores_of_keys(rows: PaddedBatch, x: Tensor) -> Float[Tensor, " scores"]:
    """Zero for the scores of keys, and a large negative number for those of padding."""
    if rows.mask is None:
        return x.new_zeros(rows.count * rows.length**2)
    masked = (rows.mask.to(x.dtype) - 1) * (torch.finfo(x.dtype).max / 2)
    return masked[:, None].expand(-1, rows.length, -1).flatten()
