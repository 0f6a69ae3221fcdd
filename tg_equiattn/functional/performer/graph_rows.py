"""Rows of nodes for linear attention, in which a long graph takes several rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ...node_batch import NodeBatch, PaddedBatch
from ...ranks import Ranks, merge_attentions
from ...slots import Slots

if TYPE_CHECKING:
    from jaxtyping import Float

_SHORTEST = 16  # slots of a row


class GraphRows:
    """Nodes in rows of one length, of whole graphs or of chunks of them.

    Attributes:
        node_batch: all graphs.
        mask: bool (rows, length), true for slots with a node; ``None`` if all have one.
        graph: the graph of each row, (rows,), if graphs are cut; ``None`` if rows are graphs.
        merges: true if queries attend to the keys of several rows, of this process or of others.
    """

    def __init__(self, padded: PaddedBatch, graph: Tensor | None = None) -> None:
        self.node_batch, self.graph, self.mask = padded.node_batch, graph, padded.mask
        self.pack, self.unpack = padded.pack, padded.unpack
        self.merges = graph is not None or padded.node_batch.ranks is not None

    def merge(
        self, content: Float[Tensor, "heads rows features e"], lse: Float[Tensor, "heads rows features"]
    ) -> tuple[Float[Tensor, "heads rows features e"], Float[Tensor, "heads rows features"]]:
        """Softmax averages and log-sum-exps over the keys of whole graphs on all ranks, from those over the keys of
        each row."""
        ranks: Ranks | None = self.node_batch.ranks
        if ranks is not None:
            return ranks.merge(content, lse)
        graphs, graph = self.node_batch.count, cast(Tensor, self.graph)

        def largest(lse: Tensor) -> Tensor:
            top = lse.new_full((len(lse), graphs, *lse.shape[2:]), torch.finfo(lse.dtype).min)
            return top.scatter_reduce(1, graph.view(-1, 1, 1).expand_as(lse), lse, "amax").index_select(1, graph)

        def sums(weight: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
            both = weight, weight * content
            total, out = (x.new_zeros(len(x), graphs, *x.shape[2:]).index_add(1, graph, x) for x in both)
            return total.index_select(1, graph), out.index_select(1, graph)

        content, lse = merge_attentions(content, lse.unsqueeze(-1), largest, sums)
        return content, lse.squeeze(-1)


def graph_rows(node_batch: NodeBatch) -> GraphRows:
    """Make the rows of a batch. Graphs are cut into several rows if most are much shorter than the longest one, or if
    their sizes are not known."""
    average = max(1, node_batch.nodes // max(1, node_batch.count))
    known = node_batch.known_sizes is not None
    if node_batch.even or node_batch.ranks is not None or (known and node_batch.bound <= 2 * average):
        return GraphRows(node_batch.padded())
    length = max(_SHORTEST, average if known else -(-average // 4))
    sizes, last = node_batch.sizes, node_batch.count - 1
    row = torch.arange(node_batch.nodes // length + node_batch.count, device=sizes.device)  # a bound of their number
    first = torch.cat([row.new_zeros(1), ((sizes + length - 1) // length).cumsum(0)])
    graph = (torch.searchsorted(first, row, right=True) - 1).clamp(max=last)
    before = (row - first[graph]) * length
    starts = node_batch.starts
    node, mask = node_batch.nodes_of_rows(starts[graph] + before, sizes[graph] - before, length)
    slot = first[node_batch.batch] * length + node_batch.within(starts)
    slots = Slots(node, mask.flatten(), slot, None)
    return GraphRows(PaddedBatch(node_batch, row.shape[0], length, mask, slots, graph), graph)
