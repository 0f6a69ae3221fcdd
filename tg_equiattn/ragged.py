"""Batches of graphs of different sizes, nodes first: packing groups of graphs into dense tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .ranks import Ranks


class Ragged:
    """Which nodes of a flat tensor ``(T, ...)`` belong to which graph.

    Make one with :meth:`flat` or :meth:`dense`.

    Attributes:
        nodes: T, of all graphs, with any padding that came with them.
        count: B, the number of graphs.
        batch: int64 ``(T,)``, the graph of each node.
        starts, sizes: int64 ``(B,)``, the first node of each graph and how many it has (here, where ranks share them).
        longest: a bound of the sizes.
        known: the sizes as numbers; ``None`` where they cannot be read.
        mask: bool ``(T,)``, false for padding; ``None`` where there is none.
        ranks: among which the nodes of every graph are shared; ``None`` where all are here.
    """

    def __init__(
        self, nodes: int, batch: Tensor, starts: Tensor, sizes: Tensor, longest: int, known: list[int] | None,
        mask: Tensor | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.nodes, self.batch, self.starts, self.sizes = nodes, batch, starts, sizes
        self.longest, self.known, self.mask, self.ranks = longest, known, mask, ranks

    @property
    def count(self) -> int:
        return self.sizes.shape[0]

    @classmethod
    def flat(
        cls,
        x: Tensor,
        batch: Tensor | None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
        ranks: Ranks | None = None,
    ) -> Ragged:
        """Of nodes x ``(T, ...)`` with a sorted graph index as users give it, ``None`` for one graph.

        Reads the index, which waits for the device on CUDA; not so where ``batch_size`` and ``max_num_nodes`` are
        given, which torch.compile needs.
        """
        nodes, device = x.shape[0], x.device
        if ranks is not None:
            batch, sizes, longest = ranks.graphs(x, batch, batch_size)
            return cls(nodes, batch, sizes.cumsum(0) - sizes, sizes, longest, sizes.tolist(), None, ranks)
        sized = batch_size is not None and max_num_nodes is not None
        if batch is not None and not sized and not readable(batch):
            raise ValueError("batch_size and max_num_nodes must be given with batch while it is traced, got None")
        count = checks.batch_index(batch, batch_size, x)
        if batch is None:
            count = count if nodes or batch_size else 0
            batch = torch.zeros(nodes, dtype=torch.int64, device=device)
            sizes = torch.full((count,), nodes, device=device)
            return cls(nodes, batch, torch.zeros_like(sizes), sizes, nodes, [nodes] * count)
        starts = torch.searchsorted(batch, torch.arange(count + 1, device=device))
        sizes = starts.diff()
        known = None
        if batch_size is None or max_num_nodes is None or checks.values_are_free(sizes):
            known = sizes.tolist()
            if max_num_nodes is not None and max(known, default=0) > max_num_nodes:
                raise ValueError(f"max_num_nodes must be at least {max(known)}, the largest graph, got {max_num_nodes}")
        if max_num_nodes is None:
            max_num_nodes = max(known or [], default=0)
        return cls(nodes, batch, starts[:-1], sizes, max_num_nodes, known)

    @classmethod
    def dense(cls, count: int, length: int, lengths: Tensor | None, device: torch.device) -> Ragged:
        """Of ``count`` graphs padded to one length, flattened, of own lengths (count,)."""
        graphs = torch.arange(count, device=device)
        batch, starts = graphs.repeat_interleave(length), graphs * length
        if lengths is None:
            sizes = torch.full((count,), length, device=device)
            return cls(count * length, batch, starts, sizes, length, [length] * count)
        mask = (torch.arange(length, device=device) < lengths[:, None]).flatten()
        known = lengths.tolist() if checks.values_are_free(lengths) else None
        return cls(count * length, batch, starts, lengths, length, known, mask)

    def zero_padding(self, x: Tensor) -> Tensor:
        """(T, ...) with zeros for padding, whatever was there."""
        if self.mask is None:
            return x
        return torch.where(self.mask.view(-1, *[1] * (x.ndim - 1)), x, 0.0)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over each graph, on all ranks: (T, ...) to (B, ...)."""
        sums = x.new_zeros(self.count, *x.shape[1:]).index_add(0, self.batch, self.zero_padding(x))
        return sums if self.ranks is None else self.ranks.sum(sums)

    def centred(self, pos: Tensor) -> Tensor:
        """Positions (T, 3) relative to the mean of their graph, in double precision."""
        pos = self.zero_padding(pos.double())
        sizes = self.sizes.double() if self.ranks is None else self.ranks.sum(self.sizes.double())
        mean = self.sum(pos) / sizes.clamp(min=1)[:, None]
        return self.zero_padding(pos - mean[self.batch])


class Group:
    """Some graphs of a batch, packed into ``(graphs, longest, ...)``.

    Attributes:
        ragged: all of them.
        graphs: int64 ``(b,)``, which these are; ``None`` for all.
        longest: the nodes of the largest.
        mask: bool ``(b, longest)``, which places have a node; ``None`` where all have.
    """

    def __init__(self, ragged: Ragged, graphs: Sequence[int] | None = None) -> None:
        self.ragged = ragged
        known, device = ragged.known, ragged.batch.device
        whole = graphs is None or len(graphs) == ragged.count
        sizes = None if known is None else [known[g] for g in (range(ragged.count) if graphs is None else graphs)]
        least = 0 if ragged.ranks is None else 1  # sums run on ranks without nodes, too
        self.longest = ragged.longest if sizes is None else max(sizes, default=0)
        self.longest = max(self.longest, least)
        self.graphs = None if whole or graphs is None else torch.tensor(graphs, device=device)
        starts, lengths = (self.of_graphs(x) for x in (ragged.starts, ragged.sizes))
        self._view = whole and sizes is not None and all(size == self.longest for size in sizes)
        self._view = self._view and ragged.nodes == ragged.count * self.longest
        place = torch.arange(self.longest, device=device)
        even = sizes is not None and all(size == self.longest for size in sizes)
        self.mask = None if even else place < lengths[:, None]
        self._from = (starts[:, None] + place).clamp(max=max(ragged.nodes - 1, 0))

    def of_graphs(self, x: Tensor) -> Tensor:
        """The rows (B, ...) of these graphs."""
        return x if self.graphs is None else x.index_select(0, self.graphs)

    def pack(self, x: Tensor) -> Tensor:
        """(T, ...) to (b, longest, ...), zero where there is no node."""
        if self._view:
            return x.unflatten(0, (-1, self.longest)) if self.longest else x.new_zeros(self._from.shape[0], *x.shape)
        if not x.shape[0]:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])  # which hangs on x, as ranks without nodes need
        out = x[self._from]
        return out if self.mask is None else torch.where(self.mask.view(*self.mask.shape, *[1] * (x.ndim - 1)), out, 0)

    def unpack(self, x: Tensor) -> Tensor:
        """(b, longest, ...) to (T, ...), zero for nodes of other graphs and for padding."""
        ragged = self.ragged
        if self._view:
            return x.flatten(0, 1)
        if not ragged.nodes:
            return x.flatten(0, 1)[:0]
        row = ragged.batch
        within = torch.arange(ragged.nodes, device=x.device) - ragged.starts[ragged.batch]
        if self.graphs is not None:
            rows = torch.full((ragged.count,), -1, device=x.device).index_copy(
                0, self.graphs, torch.arange(len(self.graphs), device=x.device)
            )
            row = rows[ragged.batch]
        here = (row >= 0) & (within < ragged.sizes[ragged.batch])
        slot = torch.where(here, row * self.longest + within, 0)
        return torch.where(here.view(-1, *[1] * (x.ndim - 2)), x.flatten(0, 1)[slot], 0)


def readable(x: Tensor) -> bool:
    """Whether numbers of x can be read, at a cost on CUDA: not while it is traced or mapped over."""
    return not (checks.is_traced(x) or checks.is_batched(x))
