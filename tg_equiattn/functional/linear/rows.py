"""Dense and ragged batches as rows of equal length: what lets one dense kernel serve graphs of any sizes.

Each graph is cut into rows of ``length`` nodes, the last one padded. Kernels treat rows as a dense batch and add up
the rows of a graph, so one long graph among short ones costs no padding to its length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import checks
from ...ranks import Ranks


class Rows:
    """Where every node of a sorted ``batch`` lies among rows, and which graph a row belongs to.

    Shapes are known without reading values, except on the CPU outside torch.compile, where reading them is free and
    gives a better row length. Graphs of equal sizes are then rows as they are, and nothing is copied.

    Args:
        nodes: nodes of all graphs together.
        graphs: number of graphs.
        batch: sorted graph index of each node; ``None`` where all graphs have the same number of nodes.
        mask: ``(graphs, nodes / graphs)`` where batch is None, true for the nodes that exist.
        longest: nodes of the largest graph, where every graph shall be one row.
        ranks: among which the nodes of every graph are shared; those of this rank are one row a graph.
    """

    def __init__(
        self,
        nodes: int,
        graphs: int = 1,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        longest: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.graphs, self.ranks = graphs, ranks
        # whether rows are the nodes as they come: not for one graph with no nodes on this rank, which is a row, too
        self.equal = batch is None or (graphs <= 1 and (nodes > 0 or ranks is None))
        self.mask = mask  # (rows, length), true where a slot holds a node; None where all do
        self.length = max(1, nodes // max(1, graphs))
        self.whole = self.equal  # whether every graph is known to be one row
        if batch is not None and not self.equal:
            starts = torch.searchsorted(batch, torch.arange(graphs + 1, device=batch.device))
            sizes = starts.diff()
            if longest is not None:
                self.whole, self.length = True, max(1, longest)
                if torch.compiler.is_compiling() or not (checks.values_are_free(batch) or checks.is_batched(batch)):
                    torch._assert_async((sizes <= longest).all(), "max_num_nodes must be at least the largest graph")
            elif checks.values_are_free(batch):
                longest = int(sizes.max())
                self.equal, self.whole = nodes == longest * graphs, longest <= 2 * self.length
                self.length = max(1, longest) if self.whole else max(16, self.length)
            else:
                self.length = max(16, -(-self.length // 4))
        self.count = nodes // self.length if self.equal else nodes // self.length + graphs
        if self.equal or batch is None:
            return
        self.batch, self.sizes = batch, sizes
        rows = (sizes + self.length - 1) // self.length
        if self.whole:
            rows, self.count = torch.ones_like(rows), graphs
        first = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
        within = torch.arange(nodes, device=batch.device) - starts[batch]
        self.slot = first[batch] * self.length + within  # of a node among all slots
        row = torch.arange(self.count, device=batch.device)
        self.graph = (torch.searchsorted(first, row, right=True) - 1).clamp(max=graphs - 1)
        filled = torch.zeros(self.count * self.length, dtype=torch.bool, device=batch.device)
        self.mask = filled.scatter(0, self.slot, True).view(self.count, self.length)

    def pack(self, x: Tensor) -> Tensor:
        """(N, heads, d) nodes to (rows, heads, length, d)."""
        if not self.equal:
            x = x.new_zeros(self.count * self.length, *x.shape[1:]).index_copy(0, self.slot, x)
        return x.view(self.count, self.length, *x.shape[1:]).transpose(1, 2)

    def unpack(self, x: Tensor) -> Tensor:
        """(rows, heads, length, d) to (N, heads, d)."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.equal else x.index_select(0, self.slot)

    def merge(self, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Of softmax averages (rows, heads, m, e) and their log-sum-exps (rows, heads, m), those of whole graphs."""
        if self.ranks is not None:
            return self.ranks.merge(content, level)
        if self.whole:
            return content, level
        index = self.graph[:, None, None].expand_as(level)
        top = level.new_full((self.graphs, *level.shape[1:]), torch.finfo(level.dtype).min)
        top = top.scatter_reduce(0, index, level.detach(), "amax").index_select(0, self.graph)
        weight = (level - top).exp()
        sums = level.new_zeros(self.graphs, *level.shape[1:]).index_add(0, self.graph, weight)
        sums = sums.index_select(0, self.graph)
        weight = (weight / sums)[..., None]
        content = content.new_zeros(self.graphs, *content.shape[1:]).index_add(0, self.graph, weight * content)
        return content.index_select(0, self.graph), sums.log() + top

    def graph_sum(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of nodes (N, ...) over each node's graph, on all ranks, and the graph's number of nodes (N,)."""
        if not self.equal:
            sums, sizes = x.new_zeros(self.graphs, *x.shape[1:]).index_add(0, self.batch, x), self.sizes
        else:
            rows = x.view(self.count, self.length, *x.shape[1:])
            sizes = torch.full((self.count,), self.length, device=x.device)
            if self.mask is not None:
                rows = torch.where(self.mask.view(*self.mask.shape, *[1] * (x.ndim - 1)), rows, 0.0)
                sizes = self.mask.sum(1)
            sums = rows.sum(1)
        if self.ranks is not None:
            sums, sizes = self.ranks.sum(sums), self.ranks.sum(sizes)
        if not self.equal:
            return sums[self.batch], sizes[self.batch]
        return self._of_rows(sums), self._of_rows(sizes)

    def _of_rows(self, x: Tensor) -> Tensor:
        """Of graphs that are rows as they come, (graphs, ...), for every node."""
        return x[:, None].expand(-1, self.length, *x.shape[1:]).flatten(0, 1)

    def centred(self, pos: Tensor) -> Tensor:
        """Positions (N, dim) relative to the mean of their graph, in double precision; the mean is without gradients,
        as nothing depends on it that is made of these by weights that add up to nothing."""
        pos = pos.double()
        with torch.no_grad():
            total, sizes = self.graph_sum(pos)
            mean = total / sizes.clamp(min=1)[:, None]
        return pos - mean


def longest_graph(batch: Tensor | None, graphs: int, max_num_nodes: int | None) -> int | None:
    """Nodes of the largest graph, read from ``batch`` where a bound is not given.

    Raises ValueError where a bound is too low (on the CPU) or, within torch.compile, missing.
    """
    if batch is None or graphs <= 1:
        return None
    free = checks.values_are_free(batch)
    if max_num_nodes is not None and not free:
        return max_num_nodes
    if torch.compiler.is_compiling():
        raise ValueError("max_num_nodes must be given within torch.compile with method='pairs' and batch, got None")
    longest = int(torch.bincount(batch).max()) if len(batch) else 0
    if max_num_nodes is not None and max_num_nodes < longest:
        raise ValueError(
            f"max_num_nodes must be at least {longest}, the nodes of the largest graph, got {max_num_nodes}"
        )
    return longest


def rows_of(
    query: Tensor, mask: Tensor | None, batch: Tensor | None, batch_size: int | None, whole: bool = False
) -> Rows:
    """The rows of a dense query (B, heads, N, d) with a mask, or of a ragged one (N, heads, d) with a batch index; rows
    of ``whole`` graphs, or as is best.

    Raises ValueError where these do not fit the query.
    """
    if query.ndim == 3:
        if mask is not None:
            raise ValueError("mask must be None where query is ragged, (N, heads, d): leave the masked nodes out")
        graphs = checks.batch_index(batch, batch_size, query)
        return Rows(query.shape[0], graphs, batch, longest=longest_graph(batch, graphs, None) if whole else None)
    if batch is not None:
        raise ValueError("batch must be None where query is dense, (B, heads, N, d): use mask")
    graphs, _, length, _ = query.shape
    checks.mask(mask, (graphs, length))
    return Rows(graphs * length, graphs, None, mask)


def zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Dense (B, heads, N, d) with zeros, not whatever was there, at nodes that do not exist, bool (B, N)."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)


def over_nodes(attend: Callable[..., Tensor], *operands: Tensor, mask: Tensor | None) -> Tensor:
    """A function of nodes (N, heads, d), one graph after the other, of dense or ragged operands."""
    if operands[0].ndim == 3:
        return attend(*operands)
    batch, _, length, _ = operands[0].shape
    nodes = (zero_where_masked(t, mask).transpose(1, 2).flatten(0, 1) for t in operands)
    return zero_where_masked(attend(*nodes).unflatten(0, (batch, length)).transpose(1, 2), mask)
