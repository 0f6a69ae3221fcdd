"""Sequences for long and short convolutions: the tokens of each graph, or of each of its chains, in order, with gaps
where an index skips numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks
from ...modes import as_numbers, is_concrete, is_readable
from ...node_batch import NodeBatch, PaddedBatch
from ...orders import check_order
from ...slots import Slots

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

MAX_STEP = 128  # larger steps of an index count as this many tokens, so that slots stay few


@dataclass
class ChainArguments:
    """Arguments of ``forward`` that say how flat tokens lie along their sequences. ``index`` and ``chain`` of any
    integer type become int64."""

    order: Int[Tensor, " tokens"] | None = None
    index: Int[Tensor, " tokens"] | None = None
    chain: Int[Tensor, " tokens"] | None = None
    num_chains: int | None = None
    max_num_nodes: int | None = None
    ring: Bool[Tensor, " tokens"] | bool | None = None

    def __post_init__(self) -> None:
        self.index, self.chain = _as_int64(self.index), _as_int64(self.chain)

    def check(self, node_batch: NodeBatch, by: str, no_ring: str = "") -> None:
        """Raise ValueError for arguments that do not fit the tokens, ``by``, the order of the module, or ``no_ring``,
        the setting of the module that rules out rings. Make ``ring`` a tensor."""
        if self.ring is False:
            self.ring = None
        elif self.ring is True:
            self.ring = torch.ones(node_batch.nodes, dtype=torch.bool, device=node_batch.sizes.device)
        if self.ring is not None:
            checks.tensor("ring", self.ring, torch.bool, [(node_batch.nodes,)], node_batch.sizes.device, " or a bool")
            if no_ring:
                raise ValueError(f"ring must be None with {no_ring}, got rings: use filter='implicit' and causal=False")
        if self.order is not None:
            check_order(self.order, node_batch)
        for name, value in (("index", self.index), ("chain", self.chain), ("ring", self.ring)):
            if value is None:
                continue
            if name != "ring":
                note = " or of another integer type"
                checks.tensor(name, value, torch.int64, [(node_batch.nodes,)], node_batch.sizes.device, note)
            if by == "radial" or self.order is not None:
                came = "order='radial'" if by == "radial" else "an order"
                raise ValueError(
                    f"{name} must be None with {came}, got a tensor: {name} says where tokens are in their sequence; "
                    "use order='input' and no order"
                )
        if self.num_chains is not None:
            checks.positive(num_chains=self.num_chains)
            if self.chain is None:
                raise ValueError(f"num_chains must be None without chain, got {self.num_chains}")


def _as_int64(x: Tensor | None) -> Tensor | None:
    if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        return x  # the check refuses all but None
    return x.long()


class Sequences:
    """Sequences of tokens, as a batch of ``rows`` with a slot for each token and each missing one.

    Args:
        rows: the slots of all sequences, as a batch.
        slots: the slot of each token. ``None`` means that slots are tokens.
        tokens: number of tokens of each sequence. ``None`` means that none is missing.
        index: the index of each token, as users give it. ``None`` means that there is none.
        ring: true for closed sequences. ``None`` means that all are open.
    """

    def __init__(
        self,
        rows: NodeBatch,
        slots: Slots | None = None,
        tokens: Int[Tensor, " sequences"] | None = None,
        index: Int[Tensor, " tokens"] | None = None,
        ring: Bool[Tensor, " sequences"] | None = None,
    ) -> None:
        self.rows, self.slots, self.tokens, self.index, self.ring = rows, slots, tokens, index, ring

    @property
    def longest(self) -> int:
        """A bound of the slots of a sequence."""
        return self.rows.bound

    @property
    def time(self) -> Int[Tensor, " tokens"]:
        """The index of each token, or its number within its sequence if there is no index."""
        if self.index is not None:
            return self.index
        within = self.rows.within(self.rows.starts)
        return within if self.slots is None else within[self.slots.slot]

    def counts(self, padded: PaddedBatch) -> Int[Tensor, " rows"] | None:
        """The number of tokens of each padded row; ``None`` if none is missing."""
        return None if self.tokens is None else padded.of_graphs(self.tokens)

    def rings(self, padded: PaddedBatch) -> Bool[Tensor, " rows"] | None:
        """True for padded rows that are rings; ``None`` if none is."""
        return None if self.ring is None else padded.of_graphs(self.ring)

    def mix(self, kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Let a kernel mix the tokens of each sequence, as :meth:`NodeBatch.mix` does. Missing tokens are zero."""
        if self.slots is None:
            return self.rows.mix(kernel, *tensors)
        return self.slots.unpack(self.rows.mix(kernel, *map(self.slots.pack, tensors)))


def by_chain(node_batch: NodeBatch, chain: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """An order of tokens in which chains are contiguous. Tokens keep their order within a chain, graphs theirs, and
    padding stays at the end of its graph."""
    order = chain.argsort(stable=True)
    graph = 2 * node_batch.batch
    graph = graph if node_batch.mask is None else graph + (~node_batch.mask).long()
    return order[graph[order].argsort(stable=True)]


def sequences_of(
    node_batch: NodeBatch,
    index: Int[Tensor, " tokens"] | None,
    chain: Int[Tensor, " tokens"] | None,
    num_chains: int | None,
    max_num_nodes: int | None,
    ring: Bool[Tensor, " tokens"] | None = None,
) -> Sequences:
    """Make the sequences of tokens whose chains are contiguous. Raise ValueError if the index does not increase along a
    sequence, or if ``ring`` changes along one."""
    if not node_batch.nodes:
        return Sequences(node_batch)
    if index is None and chain is None:
        closed = None if ring is None else _closed(ring, node_batch.batch, node_batch.count, node_batch.mask)
        return Sequences(node_batch, ring=closed)
    valid, graph = node_batch.mask, node_batch.batch
    first = _changes(graph) if chain is None else _changes(graph) | _changes(chain)
    first, step = first if valid is None else first & valid, torch.ones_like(graph)
    if index is not None:
        step = torch.cat([step[:1], torch.where(first[1:], 1, index.diff())])
        _check_increasing(step if valid is None else torch.where(valid, step, 1), index)
        step = step.clamp(max=MAX_STEP)
    step = step if valid is None else torch.where(valid, step, 0)
    count = node_batch.count if chain is None else _number_of_chains(first, num_chains)
    longest = node_batch.longest if index is None and max_num_nodes is None else max_num_nodes
    sequence = (first.cumsum(0) - 1).clamp(min=0)
    spans, tokens = (step.new_zeros(count).index_add(0, sequence, x) for x in (step, step.sign()))
    slot, closed = step.cumsum(0) - 1, None if ring is None else _closed(ring, sequence, count, valid)
    if is_concrete(spans) or (longest is None and is_readable(spans)):
        rows = _flat_rows(spans, longest)
    else:
        rows = _dense_rows(spans, longest)
        slot = slot - (spans.cumsum(0) - spans)[sequence] + sequence * rows.bound
    if index is None and valid is None and rows.nodes == node_batch.nodes:
        return Sequences(rows, ring=closed)
    return Sequences(rows, _slots_of_tokens(slot, rows.nodes, valid), None if index is None else tokens, index, closed)


def _closed(
    ring: Bool[Tensor, " tokens"], sequence: Int[Tensor, " tokens"], count: int, valid: Bool[Tensor, " tokens"] | None
) -> Bool[Tensor, " sequences"]:
    """True for sequences that are rings."""
    ring = ring if valid is None else ring & valid
    closed = ring.new_zeros(count).index_put((sequence,), ring, accumulate=True)
    differs = closed[sequence] != ring
    differs = differs if valid is None else differs & valid
    checks.must_hold(~differs.any(), "ring must be the same for all tokens of a chain")
    return closed


def _changes(x: Int[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """True for the first token and where x differs from its predecessor."""
    return torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x.diff() != 0])


def _number_of_chains(first: Bool[Tensor, " tokens"], num_chains: int | None) -> int:
    """The number of chains, or a bound of it; ``first`` is true for the first token of each."""
    count, note = first.sum(), "num_chains must be at least the number of chains"
    if num_chains is not None:
        checks.must_hold(count <= num_chains, note, lambda: f", {int(count)}, got {num_chains}")
        return num_chains
    if not is_readable(count):
        raise ValueError("num_chains must be given with chain that is traced or that torch.vmap goes over, got None")
    return max(1, as_numbers(count[None])[0])


def _flat_rows(spans: Int[Tensor, " sequences"], longest: int | None) -> NodeBatch:
    """A batch of the slots of sequences, one sequence after the other. The spans are read."""
    known = as_numbers(spans)
    if longest is not None and max(known) > longest:
        raise ValueError(f"max_num_nodes must be at least {max(known)}, the largest span of index, got {longest}")
    nodes = sum(known)
    sequence = torch.arange(len(known), device=spans.device).repeat_interleave(spans, output_size=nodes)
    return NodeBatch(nodes, spans, sequence, max(known), known)


def _dense_rows(spans: Int[Tensor, " sequences"], longest: int | None) -> NodeBatch:
    """A batch with ``longest`` slots for each sequence, for spans that cannot be read."""
    if longest is None:
        raise ValueError(
            "max_num_nodes must be given with index that is traced or that torch.vmap goes over, got None: pass a "
            "bound of the spans of index"
        )
    checks.must_hold((spans <= longest).all(), "max_num_nodes must be at least any span of index")
    return NodeBatch.dense(spans.shape[0], longest, spans, spans.device)


def _slots_of_tokens(slot: Int[Tensor, " tokens"], slots: int, valid: Bool[Tensor, " tokens"] | None) -> Slots:
    """The assignment of tokens to slots; padding has no slot."""
    place = slot if valid is None else torch.where(valid, slot, slots)
    node = torch.arange(slot.shape[0], device=slot.device)
    token = torch.full((slots + 1,), -1, device=slot.device).scatter(0, place, node)[:slots]
    return Slots(token.clamp(min=0), token >= 0, slot if valid is None else torch.where(valid, slot, 0), valid)


def _check_increasing(step: Int[Tensor, " tokens"], index: Int[Tensor, " tokens"]) -> None:
    """Raise ValueError unless steps are positive."""

    def given() -> str:
        at = int((step <= 0).nonzero()[0])
        return (
            f", got {int(index[at])} after {int(index[at - 1])}: pass chain if a graph has several chains; residue "
            "numbers of files repeat (insertion codes) and go back, so count residues along the sequence (label_seq_id "
            "of mmCIF), as 'Files of structures' in docs/chains.md shows"
        )

    checks.must_hold((step > 0).all(), "index must increase strictly within every chain", given)
