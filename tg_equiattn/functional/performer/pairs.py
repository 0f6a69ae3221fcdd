"""Softmax attention over all pairs of each graph: exact, where random features are an estimate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from ...edges import CSR
from ...modes import full_precision
from ...neighbors import NeighborList, SortedPairs
from ...node_batch import NodeBatch, PaddedBatch
from ..chunks import checkpointed, is_whole
from ..edge_products import edge_sum
from ..softmax_attention import softmax_attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MAX_SCORES = 1 << 32  # largest number of scores of all heads of one graph; they would take 16 GiB in float32
_CHUNK = 1 << 24  # scores in memory at once
_LOG_ZERO = -1e4  # finite number in place of the logarithm of zero


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
    node_batch: NodeBatch, dropout: float = 0.0, near: Near | None = None, chunk: int = _CHUNK,
) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
    r"""Softmax attention without checks, with dropout of weights.

    With the bias b of near pairs and the bias f of all pairs, the weight of a near pair is
    :math:`e^f e^{\langle q_i, k_j \rangle / \sqrt d} + e^{\langle q_i, k_j \rangle / \sqrt d + b}`. This is a softmax
    with :math:`\log(1 + e^{b - f})` added to the scores of near pairs. At most ``chunk`` scores are in memory at once;
    backward computes them again.

    Raises:
        ValueError: if one graph has more than 2^32 scores.
    """
    rows = node_batch.padded()
    heads, length = query.shape[0], rows.length
    if heads * length**2 > MAX_SCORES:
        raise ValueError(
            f"method='pairs' must have at most {MAX_SCORES} scores a graph (16 GiB in float32), got {heads} heads of "
            f"{length} nodes: pass method='features' (in RelativeGPSBlock: attn_kwargs={{'method': 'features'}})"
        )
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (rows.pack(x.to(dtype), 1) for x in (query, key, value))
        if near is None and not dropout and query.shape[-1] == value.shape[-1]:
            mask = None if rows.mask is None else rows.mask.repeat(heads, 1)
            out = softmax_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask)
            return rows.unpack(out.unflatten(0, (heads, rows.count)), 1).to(value.dtype)
        entries = None if near is None else _Entries.of(near, rows, dtype)
        repeats = near is not None and near.pairs.repeats is not False  # unread pairs may repeat
        with_shares = near is not None and near.values is not None
        attend = functools.partial(_attend, dropout=dropout, repeats=repeats, with_shares=with_shares)
        if is_whole(q) or heads * rows.count * length**2 <= chunk:
            out, shares = attend(q, k, v, rows.mask, *(entries or (None, None)))
        else:
            out, shares = _in_chunks(attend, q, k, v, rows.mask, entries, chunk)
        out = rows.unpack(out, 1)
        if near is not None and near.values is not None and shares is not None:
            of_pairs, own = shares.split([near.bias.shape[1], near.pairs.nodes], 1)
            out = out + near.added_values(of_pairs, own[..., None])
        return out.to(value.dtype)


class _Entries(NamedTuple):
    """The near pairs, followed by the pairs of each node with itself.

    ``flat_index`` is the index of a pair in the scores (rows, length, length) of a head, flattened. ``logs`` is b - f.
    """

    flat_index: Int[Tensor, " entries"]
    logs: Float[Tensor, "heads entries"]

    @classmethod
    def of(cls, near: Near, rows: PaddedBatch, dtype: torch.dtype) -> _Entries:
        pairs, length = near.pairs, rows.length
        own = torch.arange(pairs.nodes, device=pairs.target.device)
        target, source = (rows.slots_of(torch.cat([x, own])) for x in (pairs.target, pairs.source))
        bias, itself, far = (t.to(dtype) for t in (near.bias, near.self_bias, near.far_bias))
        if pairs.weights is not None:
            weights = pairs.weights.to(dtype)
            bias = bias + torch.where(weights > 0, weights, 1.0).log()
            bias = bias.masked_fill(weights <= 0, -torch.inf)
        if pairs.mask is not None:
            bias = bias.masked_fill(~pairs.mask, -torch.inf)
        logs = torch.cat([bias, itself.expand(-1, pairs.nodes)], 1) - far[:, None]
        if rows.count > 1:  # if values are not read, a pair may join two graphs
            logs = logs.masked_fill(target // length != source // length, -torch.inf)
        logs = logs.clamp(min=_LOG_ZERO)  # finite, so derivatives of exp are finite
        return cls(target * length + source % length, logs)


def _attend(
    q: Float[Tensor, "heads rows queries d"], k: Float[Tensor, "heads rows keys d"],
    v: Float[Tensor, "heads rows keys e"], mask: Bool[Tensor, "rows keys"] | None,
    index: Int[Tensor, " entries"] | None, logs: Float[Tensor, "heads entries"] | None, *, dropout: float,
    repeats: bool, with_shares: bool,
) -> tuple[Float[Tensor, "heads rows queries e"], Float[Tensor, "heads entries"] | None]:  # fmt: skip
    """Outputs of some rows and queries over valid keys; and the part of each entry's weight that is its near term."""
    scores, shares = torch.matmul(q * q.shape[-1] ** -0.5, k.mT), None
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min / 2)
    if index is None or logs is None:
        return torch.nn.functional.dropout(scores.softmax(-1), dropout) @ v, None
    flat, added = _with_near(scores.flatten(1), index, logs, repeats)
    weights = torch.nn.functional.dropout(flat.view_as(scores).softmax(-1), dropout)
    if with_shares:
        added = added.index_select(1, index) if repeats else added
        shares = weights.flatten(1).index_select(1, index) * (logs - added).exp()
    return weights @ v, shares


def _in_chunks(attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, entries: _Entries | None, budget: int):
    """:func:`_attend` with at most ``budget`` scores at once: of whole rows, or of some queries of one row."""
    heads, rows, length = q.shape[:3]
    queries = min(length, max(1, budget // (heads * length)))
    count = max(1, budget // (heads * length**2)) if queries == length else 1
    outs, chosen, shares = [], [], []
    for first in range(0, rows, count):
        some, parts = slice(first, first + count), []
        for begin in range(0, length, queries):
            some_q = q[:, some, begin : begin + queries]
            near: tuple[Tensor | None, ...] = (None, None)
            if entries is not None:
                start = (first * length + begin) * length
                index = entries.flat_index - start
                mine = ((index >= 0) & (index < some_q[0, ..., 0].numel() * length)).nonzero()[:, 0]
                near = index.index_select(0, mine), entries.logs.index_select(1, mine)
                chosen.append(mine)
            some_mask = None if mask is None else mask[some]
            out, share = checkpointed(attend, some_q, k[:, some], v[:, some], some_mask, *near, preserve_rng_state=True)
            parts.append(out)
            shares.append(share)
        outs.append(torch.cat(parts, 2))
    out = torch.cat(outs, 1)
    return out, None if shares[0] is None else torch.cat(shares, 1).index_select(1, torch.cat(chosen).argsort())


def _with_near(
    scores: Float[Tensor, "heads scores"], index: Int[Tensor, " entries"], logs: Float[Tensor, "heads entries"],
    repeats: bool,
) -> tuple[Float[Tensor, "heads scores"], Float[Tensor, "heads scores_or_entries"]]:  # fmt: skip
    """Add log(1 + exp(logs)) to the score of each entry; return the scores and the addends.

    With ``repeats``, a pair may have several entries. Its addend is then log(1 + sum of exp(logs)), and the addends are
    those of all scores instead of those of the entries.
    """
    if not repeats:
        added = torch.nn.functional.softplus(logs, threshold=40)  # the logarithm beyond it is exact
        return scores.scatter_add(1, index.expand_as(added), added), added
    every = index.expand_as(logs)
    top = torch.zeros_like(scores).scatter_reduce(1, every, logs.detach(), "amax")
    weights = (logs - top.index_select(1, index)).exp()
    added = top + (-top).exp().scatter_add(1, every, weights).log()
    return scores + added, added
