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
from ..softmax_attention import softmax_attention
from .attention import pack_heads, unpack_heads
from .edge_products import edge_sum

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MAX_SCORES = 1 << 32  # of all heads of one graph: 16 GiB in float32 if they were kept
_CHUNK = 1 << 24  # scores in memory at once
_LOG_ZERO = -1e4  # finite stand-in for the logarithm of zero


class Near(NamedTuple):
    """Terms of near pairs in attention.

    ``bias`` is that of the pairs, ``self_bias`` that of each node with itself (or one for all nodes), ``far_bias`` that
    of all pairs. ``values``, if given, are added to the values of near pairs: features of pairs, of a node with itself,
    and the map of features to values.
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
    """The matrix of the heads of nodes (rows) and the pairs whose target they are (columns), and the index of each of
    its entries among the weights of all pairs, (heads, E) flattened."""
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

    With near pairs of bias b, and f that of all pairs, a weight is :math:`e^f e^{\langle q_i, k_j \rangle / \sqrt d}
    + e^{\langle q_i, k_j \rangle / \sqrt d + b}`. This is a softmax whose scores of near pairs have
    :math:`\log(1 + e^{b - f})` added. At most ``chunk`` scores are in memory at once; backward computes them again.

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
        q, k, v = (pack_heads(x.to(dtype), rows).contiguous() for x in (query, key, value))
        if near is None and not dropout and query.shape[-1] == value.shape[-1]:
            mask = None if rows.mask is None else rows.mask.repeat(heads, 1)
            out = softmax_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask)
            return unpack_heads(out.unflatten(0, (heads, rows.count)), rows).to(value.dtype)
        entries = None if near is None else _Entries.of(near, rows, dtype)
        repeats = near is not None and near.pairs.repeats is not False  # unread pairs may repeat
        attend = functools.partial(_attend, dropout=dropout, repeats=repeats)
        if is_whole(q) or heads * rows.count * length**2 <= chunk:
            out, shares = attend(q, k, v, rows.mask, *(entries or (None, None, None, None)))
        else:
            out, shares = _in_chunks(attend, q, k, v, rows.mask, entries, chunk)
        out = unpack_heads(out, rows)
        if near is not None and near.values is not None and shares is not None:
            of_pairs, own = shares.split([near.bias.shape[1], near.pairs.nodes], 1)
            out = out + near.added_values(of_pairs, own[..., None])
        return out.to(value.dtype)


class _Entries(NamedTuple):
    """Near pairs, followed by each node with itself: the row, the query and key within it, and b - f of each head."""

    row: Int[Tensor, " entries"]
    query: Int[Tensor, " entries"]
    key: Int[Tensor, " entries"]
    logs: Float[Tensor, "heads entries"]

    @classmethod
    def of(cls, near: Near, rows: PaddedBatch, dtype: torch.dtype) -> _Entries:
        pairs, slot, length = near.pairs, rows.slot, rows.length
        own = torch.arange(pairs.nodes, device=slot.device)
        row, within = slot // length, slot % length
        target, source = (torch.cat([t, own]) for t in (pairs.target, pairs.source))
        valid = row[target] == row[source]
        if pairs.mask is not None:
            valid = valid & torch.cat([pairs.mask, torch.ones_like(own, dtype=torch.bool)])
        bias, itself, far = (t.to(dtype) for t in (near.bias, near.self_bias, near.far_bias))
        if pairs.weights is not None:
            weights = pairs.weights.to(dtype)
            bias = bias + torch.where(weights > 0, weights, 1.0).log()
            bias = bias.masked_fill(weights <= 0, -torch.inf)
        logs = torch.cat([bias, itself.expand(-1, pairs.nodes)], 1) - far[:, None]
        logs = logs.masked_fill(~valid, _LOG_ZERO).clamp(min=_LOG_ZERO)  # finite, so derivatives of exp are finite
        return cls(row[target], within[target], within[source], logs)


def _attend(
    q: Float[Tensor, "heads rows queries d"], k: Float[Tensor, "heads rows keys d"],
    v: Float[Tensor, "heads rows keys e"], mask: Bool[Tensor, "rows keys"] | None, row: Int[Tensor, " entries"] | None,
    query: Int[Tensor, " entries"] | None, key: Int[Tensor, " entries"] | None,
    logs: Float[Tensor, "heads entries"] | None, *, dropout: float, repeats: bool,
) -> tuple[Float[Tensor, "heads rows queries e"], Float[Tensor, "heads entries"] | None]:  # fmt: skip
    """Outputs of some rows and queries over valid keys; and the share of each entry's weight that is its near term."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min / 2)
    if row is None or query is None or key is None or logs is None:
        return torch.nn.functional.dropout(scores.softmax(-1), dropout) @ v, None
    heads, rows, queries, keys = scores.shape
    head = torch.arange(heads, device=row.device)[:, None]
    index = (((head * rows + row) * queries + query) * keys + key).flatten()
    scores, added = _with_near(scores, index, logs, repeats)
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout)
    shares = weights.flatten().index_select(0, index).view_as(logs) * (logs - added).exp()
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
            near: tuple[Tensor | None, ...] = (None, None, None, None)
            if entries is not None:
                here = (entries.row >= first) & (entries.row < first + count)
                here = here & (entries.query >= begin) & (entries.query < begin + queries)
                mine = here.nonzero()[:, 0]
                row, query, key = (x.index_select(0, mine) for x in entries[:3])
                near = row - first, query - begin, key, entries.logs.index_select(1, mine)
                chosen.append(mine)
            some_mask = None if mask is None else mask[some]
            operands = q[:, some, begin : begin + queries], k[:, some], v[:, some], some_mask, *near
            out, share = checkpointed(attend, *operands, preserve_rng_state=True)
            parts.append(out)
            shares.append(share)
        outs.append(torch.cat(parts, 2))
    out = torch.cat(outs, 1)
    return out, None if entries is None else torch.cat(shares, 1).index_select(1, torch.cat(chosen).argsort())


def _with_near(
    scores: Float[Tensor, "heads rows queries keys"], index: Int[Tensor, " entries"],
    logs: Float[Tensor, "heads entries"], repeats: bool,
) -> tuple[Float[Tensor, "heads rows queries keys"], Float[Tensor, "heads entries"]]:  # fmt: skip
    """Scores with log(1 + sum of exp(logs)) added at the flat index of each entry; and the addend of each entry. A pair
    given several times has a sum of several terms, if ``repeats``."""
    if not repeats:
        added = -torch.nn.functional.logsigmoid(-logs)
        return scores.flatten().index_add(0, index, added.flatten()).view_as(scores), added
    top = torch.zeros_like(scores).flatten().scatter_reduce(0, index, logs.detach().flatten(), "amax")
    weights = (logs.flatten() - top.index_select(0, index)).exp()
    everywhere = top + (-top).exp().index_add(0, index, weights).log()
    return scores + everywhere.view_as(scores), everywhere.index_select(0, index).view_as(logs)
