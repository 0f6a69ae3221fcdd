"""Batches of graphs of different sizes, nodes one after the other, and how they reach kernels of padded rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..shapes import Bool, Float, Int, Shaped
from ..torch_state import by_form, is_mapped, is_readable, read


class Slots(NamedTuple):
    """An assignment of nodes to slots.

    Attributes:
        node: the node of each slot.
        filled: true for slots with a node; ``None`` if all have one.
        slot: the slot of each node.
        packed: true for nodes with a slot; ``None`` if all have one.
    """

    node: Int[Tensor, " slots"]
    filled: Bool[Tensor, " slots"] | None
    slot: Int[Tensor, " nodes"]
    packed: Bool[Tensor, " nodes"] | None

    @classmethod
    def of_order(cls, order: Int[Tensor, " nodes"]) -> Slots:
        """Slots that take node ``order[p]`` at position p."""
        return cls(order, None, inverse(order), None)

    def pack(self, x: Shaped[Tensor, "*before nodes *after"], dim: int = 0) -> Shaped[Tensor, "*before slots *after"]:
        return _gather(x, dim, self.node, self.filled, self.slot, self.packed)

    def unpack(self, x: Shaped[Tensor, "*before slots *after"], dim: int = 0) -> Shaped[Tensor, "*before nodes *after"]:
        return _gather(x, dim, self.slot, self.packed, self.node, self.filled)


class _Gather(torch.autograd.Function):
    """:func:`_gather`, whose backward is a gather, too. The backward of autograd would add rows one by one."""

    @staticmethod
    def forward(
        ctx, x: Tensor, dim: int, index: Tensor, mask: Tensor | None, back: Tensor, back_mask: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(index, mask, back, back_mask)
        ctx.dim = dim
        if not x.shape[dim]:
            return x.new_zeros(*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
        out = x.contiguous().index_select(dim, index)  # takes longer from other layouts
        return out if mask is None else out.masked_fill_(beside(~mask, x, dim), 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, mask, back, back_mask = ctx.saved_tensors
        return _gather(grad, ctx.dim, back, back_mask, index, mask), *[None] * 5


def _gathered(x: Tensor, dim: int, index: Tensor, mask: Tensor | None, *inverse: Tensor | None) -> Tensor:
    """x[index] along an axis, zero where ``mask`` is false. The ``inverse`` has an index and a mask, too."""
    if not x.shape[dim]:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])], dim)
    out = x.index_select(dim, index)
    return out if mask is None else torch.where(beside(mask, x, dim), out, 0.0)


_gather = by_form(_gathered, _Gather.apply, traced=True)


def beside(flags: Shaped[Tensor, " nodes"], x: Shaped[Tensor, "*before nodes *after"], dim: int = 0) -> Tensor:
    """Flags with axes of size 1 appended, to broadcast with x, whose nodes are along an axis."""
    return flags.view(-1, *[1] * (x.ndim - 1 - dim))


def inverse(order: Int[Tensor, " nodes"]) -> Int[Tensor, " nodes"]:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))


_UNREAD = "batch_size and max_num_nodes must be given with batch that is traced or that torch.vmap goes over, got None"


class NodeBatch:
    """Graphs whose nodes (and padding) lie one after the other in flat tensors ``(T, ...)``. Make one with :meth:`flat`
    or :meth:`dense`.

    Sizes of graphs are read as numbers when the batch is made, or never: where that costs nothing (on the CPU, outside
    torch.compile), and where the caller needs whole graphs without knowing their sizes.

    Attributes:
        nodes: number of nodes, with padding.
        sizes: nodes of each graph.
        known_sizes: ``sizes`` as numbers; ``None`` if they were not read.
        longest: a bound of the sizes; ``None`` if there is none.
        even: true if every graph has ``longest`` slots.
        mask: false for padding; ``None`` without padding.
        order: the nodes, graph after graph; ``None`` if they lie so.
    """

    def __init__(
        self, nodes: int, sizes: Int[Tensor, " graphs"], batch: Int[Tensor, " nodes"] | None = None,
        longest: int | None = None, known_sizes: list[int] | None = None, mask: Bool[Tensor, " nodes"] | None = None,
        order: Int[Tensor, " nodes"] | None = None,
    ) -> None:  # fmt: skip
        self.nodes, self.sizes, self.mask, self._batch = nodes, sizes, mask, batch
        self.known_sizes, self.longest = known_sizes, longest
        sorted_evenly = order is None and known_sizes is not None and nodes == self.count * (longest or 0)
        self.even, self.order = batch is None or sorted_evenly, order

    @classmethod
    def flat(
        cls, x: Shaped[Tensor, "nodes ..."], batch: Int[Tensor, " nodes"] | None, batch_size: int | None = None,
        max_num_nodes: int | None = None, whole: bool = True, any_order: bool = False,
    ) -> NodeBatch:  # fmt: skip
        """Make a batch from nodes x and the graph index that users give.

        Args:
            x: the nodes.
            batch: graph index of each node; ``None`` for one graph.
            batch_size: number of graphs; ``None`` reads it from ``batch``.
            max_num_nodes: a bound of the nodes of a graph; ``None`` reads it from ``batch`` if graphs are needed whole.
            whole: whether graphs are needed whole, so that the longest one has to be known.
            any_order: whether ``batch`` may be in any order. It is sorted if it is not known to be so.

        Raises:
            ValueError: for a ``batch`` that does not fit, and if sizes are needed but cannot be read.
        """
        sized = batch_size is not None and max_num_nodes is not None
        if whole and batch is not None and not sized and not is_readable(batch, wait=True):
            raise ValueError(_UNREAD)
        index, order, nodes = batch, None, x.shape[0]
        if any_order and isinstance(batch, Tensor) and batch.dtype == torch.int64 and not known_sorted(batch):
            batch, order = batch.sort(stable=True)
        count = checks.batch_index(batch, batch_size, x, any_order)
        if batch is None or count == 1:
            _check_bound(nodes, max_num_nodes)
            return cls.dense(1 if nodes or batch_size else 0, nodes, None, x.device)
        sizes = torch.searchsorted(batch, torch.arange(count + 1, device=x.device)).diff()
        if (sized or not whole) and not is_readable(sizes):
            if max_num_nodes is not None:
                checks.must_hold((sizes <= max_num_nodes).all(), "max_num_nodes must be at least any graph")
            return cls(nodes, sizes, index, max_num_nodes, order=order)
        known = read(sizes, wait=True)
        longest = max([0, *known])
        _check_bound(longest, max_num_nodes)
        return cls(nodes, sizes, index, longest, known, order=order)

    @classmethod
    def dense(
        cls, count: int, length: int, valid: Int[Tensor, " graphs"] | Bool[Tensor, "graphs length"] | None,
        device: torch.device,
    ) -> NodeBatch:  # fmt: skip
        """Make a batch from ``count`` graphs padded to one length, flattened.

        Args:
            count: number of graphs.
            length: slots of each graph.
            valid: own lengths, or a mask; ``None`` without padding.
            device: where the nodes are.
        """
        if valid is None:
            sizes = torch.full((count,), length, device=device)
            return cls(count * length, sizes, None, length, [length] * count if is_readable(sizes, wait=True) else None)
        if valid.dtype == torch.bool:
            sizes, mask = valid.sum(1), valid
        else:
            sizes, mask = valid, torch.arange(length, device=device) < valid[:, None]
        return cls(count * length, sizes, None, length, read(sizes), mask.flatten())

    @property
    def count(self) -> int:
        """The number of graphs, B."""
        return self.sizes.shape[0]

    @property
    def batch(self) -> Int[Tensor, " nodes"]:
        """The graph of each node."""
        if self._batch is not None:
            return self._batch
        return torch.arange(self.count, device=self.sizes.device).repeat_interleave(self.bound)

    @property
    def starts(self) -> Int[Tensor, " graphs"]:
        """The first node of each graph."""
        if self.even:
            return torch.arange(self.count, device=self.sizes.device) * self.bound
        return self.sizes.cumsum(0) - self.sizes

    @property
    def bound(self) -> int:
        """``longest``; ValueError if no bound of the sizes is known."""
        if self.longest is None:
            raise ValueError(_UNREAD)
        return self.longest

    def read_sizes(self) -> list[int]:
        """The sizes as numbers; CUDA waits for those that are not known."""
        if self.known_sizes is not None:
            return self.known_sizes
        sizes = read(self.sizes, wait=True)
        if sizes is None:
            raise ValueError(_UNREAD)
        return sizes

    def zero_padding(self, x: Shaped[Tensor, "*before nodes *after"], dim: int = 0) -> Tensor:
        """Values of nodes, along an axis, with zeros in place of padding, which may hold anything."""
        return x if self.mask is None else torch.where(beside(self.mask, x, dim), x, 0.0)

    def sum(self, x: Shaped[Tensor, "nodes ..."]) -> Shaped[Tensor, "graphs ..."]:
        """Sums over each graph."""
        x = self.zero_padding(x)
        if self.even:
            return x.reshape(self.count, self.bound, *x.shape[1:]).sum(1)
        return x.new_zeros(self.count, *x.shape[1:]).index_add(0, self.batch, x)

    def mean(self, x: Float[Tensor, "nodes ..."]) -> Float[Tensor, "graphs ..."]:
        """Means over each graph, zero for empty ones."""
        return self.sum(x) / self.sizes.clamp(min=1).to(x.dtype).view(-1, *[1] * (x.ndim - 1))

    def spread(self, x: Shaped[Tensor, "graphs ..."]) -> Shaped[Tensor, "nodes ..."]:
        """Values of graphs for each of their nodes."""
        if self.even:
            return x[:, None].expand(-1, self.bound, *x.shape[1:]).flatten(0, 1)
        return x.index_select(0, self.batch)

    def centred(self, pos: Float[Tensor, "nodes dim"], detach: bool = False) -> Float[Tensor, "nodes dim"]:
        """Positions relative to the mean of their graph, in double precision, zero for padding.

        With ``detach`` no gradient goes through the mean, which changes nothing for functions of differences.
        """
        pos = self.zero_padding(pos.double())
        mean = self.mean(pos.detach() if detach else pos)
        return self.zero_padding(pos - self.spread(mean))

    def padded(self, key: Any = None) -> Parts:
        """All graphs as one group with a key."""
        length = max(1, self.bound)
        if self.even:
            mask = None if self.mask is None else self.mask.view(-1, length)
            return Parts([PaddedBatch(self, self.nodes // length, length, mask, key=key)], None)
        starts = self.starts
        node, mask = self.nodes_of_rows(starts, self.sizes, length)
        slots = Slots(node, mask.flatten(), self.batch * length + self.within(starts), None)
        return Parts([PaddedBatch(self, self.count, length, mask, key=key)], slots)

    @property
    def sorted_index(self) -> Int[Tensor, " nodes"]:
        """The index of each node, counted graph after graph."""
        return torch.arange(self.nodes, device=self.sizes.device) if self.order is None else inverse(self.order)

    def within(self, starts: Int[Tensor, " graphs"]) -> Int[Tensor, " nodes"]:
        """The position of each node in its graph, from the first node of each graph."""
        return self.sorted_index - starts[self.batch]

    def nodes_of_rows(
        self, starts: Int[Tensor, " rows"], sizes: Int[Tensor, " rows"], length: int
    ) -> tuple[Int[Tensor, " slots"], Bool[Tensor, "rows length"]]:
        """The node of each slot, flattened, and a mask of the slots with a node. A row holds ``sizes`` nodes of a graph
        from ``starts`` on, counted graph after graph."""
        slot = torch.arange(length, device=starts.device)
        node = (starts[:, None] + slot).clamp(max=max(self.nodes - 1, 0)).flatten()
        return node if self.order is None else self.order[node], slot < sizes[:, None]

    def mix(
        self, kernel: Callable[..., Tensor], *tensors: Shaped[Tensor, "*before nodes *after"], dim: int = 0,
        groups: Mapping[Any, Sequence[int]] | None = None,
    ) -> Shaped[Tensor, "*before nodes *after"]:  # fmt: skip
        """Apply a kernel, which mixes the nodes of each graph, to padded groups of graphs.

        Args:
            kernel: function ``kernel(*tensors, padded)`` of the tensors (..., b, n, ...) of a group, zero where there
                is no node, and of their :class:`PaddedBatch`. It returns one tensor (..., b, n, ...).
            tensors: features of the nodes.
            dim: axis of the nodes, counted from the front.
            groups: lists of graphs to pack together. The kernel reads the key of each list as ``padded.key``. Outputs
                of graphs in no group are zero. The default, ``None``, groups graphs whose sizes differ by less than a
                factor of two, if sizes are known.
        """
        if not self.nodes:
            return kernel(*(x.unsqueeze(dim) for x in tensors), PaddedBatch(self, 1, 0)).flatten(dim, dim + 1)
        parts = self.parts(groups)
        packed = zip(*[parts.pack(x, dim) for x in tensors], parts.rows, strict=True)
        return parts.unpack([kernel(*of_group) for of_group in packed], dim)

    def parts(self, groups: Mapping[Any, Sequence[int]] | None = None, worth: int = 0) -> Parts:
        """The padded groups of graphs of :meth:`mix`; by default those of :meth:`by_size`. A single group of an even
        batch needs no copy."""
        if groups is None:
            groups = {} if self.even else self.by_size(worth)
            is_one = len(groups) <= 1
        else:
            is_one = self.even and len(groups) == 1
        return self.padded(next(iter(groups), None)) if is_one else self._grouped(groups)

    def by_size(self, worth: int = 0) -> dict[int, list[int]]:
        """Groups of graphs whose sizes differ by less than a factor of two, the largest first; none if sizes are not
        known. A group joins the next larger one if that adds fewer than ``worth`` padded score entries."""
        groups: dict[int, list[int]] = {}
        sizes = self.known_sizes or []
        for graph, size in enumerate(sizes):
            if size:
                groups.setdefault(size.bit_length(), []).append(graph)
        joined: dict[int, list[int]] = {}
        last, longest = 0, 0
        for key, graphs in sorted(groups.items(), reverse=True):
            length = max(sizes[g] for g in graphs)
            if joined and len(graphs) * (longest**2 - length**2) < worth:
                joined[last] += graphs
            else:
                joined[key], last, longest = graphs, key, length
        return joined

    def _grouped(self, groups: Mapping[Any, Sequence[int]]) -> Parts:
        sizes, device, starts = self.read_sizes(), self.sizes.device, self.starts
        parts, node, filled, first, count = [], [], [], starts.new_full((self.count,), -1), 0
        for key, graphs in groups.items():
            length = max([0, *(sizes[g] for g in graphs)])
            full = all(sizes[g] == length for g in graphs)
            index = torch.tensor(graphs, device=device)
            nodes, mask = self.nodes_of_rows(starts[index], self.sizes[index], length)
            parts.append(PaddedBatch(self, len(graphs), length, None if full else mask, index, key))
            node.append(nodes)
            filled.append(mask.flatten())
            first = first.index_copy(0, index, count + length * torch.arange(len(graphs), device=device))
            count += length * len(graphs)
        batch = self.batch
        first, within = first[batch], self.within(starts)
        packed, slot = None, first + within
        if self.mask is not None or sum(map(len, groups.values())) < self.count:
            packed = (first >= 0) & (within < self.sizes[batch])
            slot = torch.where(packed, slot, 0)
        full = all(part.mask is None for part in parts)
        return Parts(parts, Slots(torch.cat(node), None if full else torch.cat(filled), slot, packed))


def _check_bound(longest: int, max_num_nodes: int | None) -> None:
    """Raise ValueError if the largest graph has more nodes than its bound."""
    if max_num_nodes is not None and longest > max(1, max_num_nodes):
        raise ValueError(f"max_num_nodes must be at least {longest}, the largest graph, got {max_num_nodes}")


def known_sorted(batch: Int[Tensor, " nodes"]) -> bool:
    """True if an index is sorted, or if this has to be assumed: under ``torch.vmap``."""
    return is_mapped(batch) or (is_readable(batch) and bool((batch[1:] >= batch[:-1]).all()))


class PaddedBatch:
    """Nodes in rows of one length.

    Attributes:
        node_batch: all graphs.
        count: number of rows.
        length: slots of each row.
        mask: true for slots with a node; ``None`` if all have one.
        graph: the graph of each row; ``None`` if rows are the graphs of the batch.
        key: the key of the group that the graphs are of, in :meth:`NodeBatch.mix`.
    """

    def __init__(
        self, node_batch: NodeBatch, count: int, length: int, mask: Bool[Tensor, "rows length"] | None = None,
        graph: Int[Tensor, " rows"] | None = None, key: Any = None,
    ) -> None:  # fmt: skip
        self.node_batch, self.count, self.length = node_batch, count, length
        self.mask, self.graph, self.key = mask, graph, key

    @property
    def lengths(self) -> Int[Tensor, " rows"] | None:
        """Nodes of each row that is a whole graph, at its start; ``None`` if all slots have a node."""
        return None if self.mask is None else self.of_graphs(self.node_batch.sizes)

    def of_graphs(self, x: Shaped[Tensor, "graphs ..."]) -> Shaped[Tensor, "rows ..."]:
        """Values of graphs for each row."""
        return x if self.graph is None else x.index_select(0, self.graph)


class Parts(NamedTuple):
    """Groups of graphs, each padded to its own longest graph.

    Attributes:
        rows: the graphs of each group.
        slots: the slots of nodes in the groups, one group after the other; ``None`` if nodes are their own slots.
    """

    rows: list[PaddedBatch]
    slots: Slots | None

    def pack(self, x: Shaped[Tensor, "*before nodes *after"], dim: int = 0) -> list[Tensor]:
        """Values of nodes, along an axis, in the slots (rows, length) of each group, zero where there is no node."""
        x = x if self.slots is None else self.slots.pack(x, dim)
        first, *others = self.rows
        if not others:
            return [x.unflatten(dim, (first.count, first.length))]
        parts = x.split([rows.count * rows.length for rows in self.rows], dim)
        return [x.unflatten(dim, (rows.count, rows.length)) for x, rows in zip(parts, self.rows, strict=True)]

    def pack_together(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Sequence[Tensor]]:
        """For each group, the tensors in its slots, in one pass. Their last axes may differ."""
        if self.slots is None:
            return list(zip(*[self.pack(x, dim) for x in tensors], strict=True))
        widths = [x.shape[-1] for x in tensors]
        return [x.split(widths, -1) for x in self.pack(torch.cat(list(tensors), -1), dim)]

    def unpack(self, parts: Sequence[Shaped[Tensor, "*before rows length *after"]], dim: int = 0) -> Tensor:
        """The inverse of :meth:`pack`."""
        flat = [x.flatten(dim, dim + 1) for x in parts]
        x = flat[0] if len(flat) == 1 else torch.cat(flat, dim)
        return x if self.slots is None else self.slots.unpack(x, dim)

    def unpack_together(self, tensors: Sequence[Tensor], dim: int = 0) -> Sequence[Tensor]:
        """:meth:`unpack` of tensors of a single group, whose last axes may differ, in one pass."""
        if self.slots is None:
            return [x.flatten(dim, dim + 1) for x in tensors]
        return self.unpack([torch.cat(list(tensors), -1)], dim).split([x.shape[-1] for x in tensors], -1)

    def scores(self) -> tuple[Int[Tensor, " nodes"], Int[Tensor, " nodes"]]:
        """The index of each node's first score, among the scores (rows, length, length) of all groups, one after the
        other; and its place in its row."""
        rows, nodes = self.rows[0], self.rows[0].node_batch
        slot = torch.arange(nodes.nodes, device=nodes.sizes.device) if self.slots is None else self.slots.slot
        if len(self.rows) == 1:
            return slot * rows.length, slot % rows.length
        count, length = torch.tensor([(rows.count, rows.length) for rows in self.rows], device=slot.device).T
        slots = (count * length).cumsum(0)
        group = torch.searchsorted(slots, slot, right=True)
        slot = slot - (slots - count * length)[group]
        scores = count * length.square()
        return (scores.cumsum(0) - scores)[group] + slot * length[group], slot % length[group]
