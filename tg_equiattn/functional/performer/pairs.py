"""Softmax attention over all pairs of each graph: exact, where random features are an estimate."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ...edges import CSR
from ...modes import as_numbers, full_precision
from ...neighbors import NeighborList, SortedPairs
from ...node_batch import NodeBatch, Parts
from .. import hashed_dropout
from ..edge_products import edge_sum
from ..softmax_attention import softmax_attention
from ..tiles import is_whole, joined, recomputed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MAX_SCORES = 1 << 32  # largest number of scores of all heads of one graph; they would take 16 GiB in float32
_CHUNK = 1 << 24  # scores in memory at once
_PADDING = 1 << 15  # scores of padding that take less time than one more group of graphs
_LOG_ZERO = -1e4  # finite number in place of the logarithm of zero


# queries, keys, values, mask of keys, hashes of queries and of keys for dropout
_Tile = tuple[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]


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
    heads, length = query.shape[0], max(1, node_batch.bound)
    if heads * length**2 > MAX_SCORES:
        raise ValueError(
            f"method='pairs' must have at most {MAX_SCORES} scores a graph (16 GiB in float32), got {heads} heads of "
            f"{length} nodes: pass method='features' (in RelativeGPSBlock: attn_kwargs={{'method': 'features'}})"
        )
    with full_precision(query.device):
        dtype, parts = torch.promote_types(query.dtype, torch.float32), node_batch.parts(worth=_PADDING // heads)
        q, k, v = (parts.pack(x.to(dtype), 1) for x in (query, key, value))
        masks = [rows.mask for rows in parts.rows]
        if near is None and not dropout and query.shape[-1] == value.shape[-1]:
            return parts.unpack([_by_kernel(*some) for some in zip(q, k, v, masks, strict=True)], 1).to(value.dtype)
        row, column = _hashes(heads, node_batch.nodes, parts, hashed_dropout.draw_seed(dropout, query.device), dropout)
        operands: Any = zip(q, k, v, masks, row, column, strict=True)
        tiles = [tile for some in operands for tile in _tiles(some, chunk)]
        order, entries = _entries_of_tiles(near, parts, dtype, tiles)
        repeats = near is not None and near.pairs.repeats is not False  # if not read, too
        settings = dropout, repeats, near is not None and near.values is not None
        again = len(tiles) > 1 and sum(map(_scores, tiles)) > chunk // heads
        attend: Callable = functools.partial(recomputed, _attend) if again else _attend
        outs, shares = zip(
            *(attend(settings, *tile, *own) for tile, own in zip(tiles, entries, strict=True)), strict=True
        )
        out = parts.unpack(outs, 1)
        if near is not None and near.values is not None:
            weights = joined(shares, 1)
            weights = weights if order is None else weights.index_select(1, order.argsort())
            of_pairs, own = weights.split([near.bias.shape[1], near.pairs.nodes], 1)
            out = out + near.added_values(of_pairs, own[..., None])
        return out.to(value.dtype)


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    mask = None if mask is None else mask.repeat(len(q), 1)
    return softmax_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask).unflatten(0, q.shape[:2])


def _hashes(
    heads: int, nodes: int, parts: Parts, seed: Int[Tensor, ""], dropout: float
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The hashes of queries (heads, rows, length) and of keys (length) of each group; None without dropout."""
    lengths = [rows.length for rows in parts.rows]
    if not dropout:
        return [None] * len(lengths), [None] * len(lengths)
    row, column = hashed_dropout.hashes(heads * nodes, max(lengths), seed)
    return list(parts.pack(row.view(heads, nodes), 1)), [column[:length] for length in lengths]


def _tiles(operands: _Tile, chunk: int) -> Iterator[_Tile]:
    """Operands of at most ``chunk`` scores: of whole rows, or of some queries of one row."""
    q, k, v, mask, row, column = operands
    heads, rows, length = q.shape[:3]
    if is_whole(q) or heads * rows * length**2 <= chunk:
        yield operands
        return
    queries = min(length, max(1, chunk // (heads * length)))
    count = max(1, chunk // (heads * length**2)) if queries == length else 1
    for n in range(0, rows, count):
        some, some_mask = (slice(None), slice(n, n + count)), None if mask is None else mask[n : n + count]
        for m in range(0, length, queries):
            of_queries = *some, slice(m, m + queries)
            yield q[of_queries], k[some], v[some], some_mask, None if row is None else row[of_queries], column


def _scores(tile: _Tile) -> int:
    """Scores of one head."""
    return tile[0][0, ..., 0].numel() * tile[1].shape[2]


def _entries(
    near: Near, parts: Parts, dtype: torch.dtype
) -> tuple[Int[Tensor, " entries"], Float[Tensor, "heads entries"]]:
    """The near pairs, followed by the pairs of each node with itself: their index among the scores of a head, of all
    rows (length, length), one after the other; and b - f."""
    pairs, (first, place) = near.pairs, parts.scores()
    bias, itself, far = (t.to(dtype) for t in (near.bias, near.self_bias, near.far_bias))
    if pairs.weights is not None:
        weights = pairs.weights.to(dtype)
        bias = bias + torch.where(weights > 0, weights, 1.0).log()
        bias = bias.masked_fill(weights <= 0, -torch.inf)
    if pairs.mask is not None:
        bias = bias.masked_fill(~pairs.mask, -torch.inf)
    node_batch, column = parts.rows[0].node_batch, place.index_select(0, pairs.source)
    if node_batch.count > 1:  # if values are not read, a pair may join two graphs
        graph, other = (node_batch.batch.index_select(0, nodes) for nodes in (pairs.target, pairs.source))
        bias, column = bias.masked_fill(graph != other, -torch.inf), column.masked_fill(graph != other, 0)
    logs = torch.cat([bias, itself.expand(-1, pairs.nodes)], 1) - far[:, None]
    logs = logs.clamp(min=_LOG_ZERO)  # finite, so derivatives of exp are finite
    return torch.cat([first.index_select(0, pairs.target) + column, first + place]), logs


def _entries_of_tiles(
    near: Near | None, parts: Parts, dtype: torch.dtype, tiles: list[_Tile]
) -> tuple[Tensor | None, list[tuple[Tensor | None, Tensor | None]]]:
    """The order of the entries by tile, if there are several tiles; and the entries of each tile."""
    if near is None:
        return None, [(None, None)] * len(tiles)
    index, logs = _entries(near, parts, dtype)
    if len(tiles) == 1:
        return None, [(index, logs)]
    firsts = [0, *itertools.accumulate(map(_scores, tiles))]
    index, order = index.sort()
    counts = as_numbers(torch.searchsorted(index, torch.tensor(firsts, device=index.device)).diff())
    each = zip(firsts, index.split(counts), logs.index_select(1, order).split(counts, 1), strict=False)
    return order, [(some - first, of_some) for first, some, of_some in each]


def _attend(
    settings: tuple[float, bool, bool], q: Float[Tensor, "heads rows queries d"], k: Float[Tensor, "heads rows keys d"],
    v: Float[Tensor, "heads rows keys e"], mask: Bool[Tensor, "rows keys"] | None,
    row: Int[Tensor, "heads rows queries"] | None, column: Int[Tensor, " keys"] | None,
    index: Int[Tensor, " entries"] | None, logs: Float[Tensor, "heads entries"] | None,
) -> tuple[Float[Tensor, "heads rows queries e"], Float[Tensor, "heads entries"] | None]:  # fmt: skip
    """Outputs of some rows and queries over valid keys; and the part of each entry's weight that is its near term."""
    dropout, repeats, with_shares = settings
    scores, shares = torch.matmul(q * q.shape[-1] ** -0.5, k.mT), None
    if mask is not None:
        masked = (mask.to(scores.dtype) - 1) * (torch.finfo(scores.dtype).max / 2)
        scores = scores + masked[:, None]  # unlike masked_fill, no work in backward
    added: Any = None
    if index is not None and logs is not None:
        flat, added = _with_near(scores.flatten(1), index, logs, repeats)
        scores = flat.view_as(scores)
    weights = scores.softmax(-1)
    if row is not None and column is not None:
        weights = weights * hashed_dropout.keep(row[..., None], column, dropout, weights.dtype)
    if with_shares and index is not None and logs is not None:
        added = added.index_select(1, index) if repeats else added
        shares = weights.flatten(1).index_select(1, index) * (logs - added).exp()
    return weights @ v, shares


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
