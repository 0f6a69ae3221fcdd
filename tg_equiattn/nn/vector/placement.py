"""Preparation of tokens for operators: tokens of a chain are contiguous and in order, and positions are centred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, cat

from ... import checks
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from ...orders import radial_order
from ...slots import Slots
from .sequences import ChainArguments, Sequences, by_chain, sequences_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TokenBatch(NamedTuple):
    """Data of tokens that operators need in addition to features.

    Attributes:
        pos: positions relative to the mean of the graph, zero for padding and without positions.
        graphs: the graphs, whose tokens attention mixes.
        sequences: the sequences that convolutions run along.
        slots: gathers from the order of the user, and back; ``None`` if the order is the user's.
        edges: the edges, for local context.
    """

    pos: Float[Tensor, "tokens 3"]
    graphs: NodeBatch
    sequences: Sequences
    slots: Slots | None = None
    edges: NeighborList | None = None

    def restore(self, x: Tensor) -> Tensor:
        """Features (T, ...) in the order of the user, zero for padding."""
        x = self.graphs.zero_padding(x)
        return x if self.slots is None else self.slots.unpack(x)


def place_tokens(
    x: Float[Tensor, "tokens dim"],
    pos: Tensor | None,
    node_batch: NodeBatch,
    along: ChainArguments,
    *,
    by: str,
    causal: bool,
    invariants: Sequence[slice],
    needs_positions: bool,
) -> tuple[Float[Tensor, "tokens dim"], TokenBatch]:
    """Check the user's arguments, and put tokens in order.

    Args:
        x: features of the tokens.
        pos: their positions, as the user gives them.
        node_batch: the graphs.
        along: the user's order, chains and indices.
        by: the order of the module, ``"input"`` or ``"radial"``. It is used if the user gives no order and no chains.
        causal: true if the module is causal, so that positions are refused.
        invariants: columns of x with invariants, which order tokens at equal radii.
        needs_positions: true if part of the output would be zero without positions.
    """
    along.check(node_batch, by)
    if pos is None and needs_positions:
        raise ValueError(
            "pos must be given, got None: without positions and vectors, part of the output would always be zero"
        )
    if pos is not None and causal:
        raise ValueError(
            "pos must be None with causal=True, got positions: they are relative to the mean over all tokens, which "
            "later tokens change; pass differences of positions as vectors"
        )
    order, radial = along.order, along.order is None and by == "radial"
    if pos is None and radial:
        raise ValueError("pos must be given with order='radial', got None: pass pos, or use order='input'")
    x = node_batch.zero_padding(x)
    if pos is None:
        pos = x.new_zeros(node_batch.nodes, 3)
    else:
        pos = checks.positions(pos, (node_batch.nodes, 3), x, "")
        pos = node_batch.zero_padding(pos if pos.is_floating_point() else pos.double())
        if radial:
            order = radial_order(pos, node_batch, cat([x[:, :0], *(x[:, part] for part in invariants)], 1))
        pos = node_batch.centred(pos).to(x.dtype)
    order, sequences = order_and_sequences(node_batch, along, order)
    if order is None:
        return x, TokenBatch(pos, node_batch, sequences)
    slots = Slots.of_order(order)
    return slots.pack(x), TokenBatch(slots.pack(pos), node_batch, sequences, slots)


def order_and_sequences(
    node_batch: NodeBatch, along: ChainArguments, order: Int[Tensor, " tokens"] | None
) -> tuple[Int[Tensor, " tokens"] | None, Sequences]:
    """The order of the tokens, by chain if there are chains and else the given one, and the sequences of tokens in this
    order."""
    index, chain = along.index, along.chain
    if chain is not None:
        order = by_chain(node_batch, chain)
        index, chain = None if index is None else index[order], chain[order]
    return order, sequences_of(node_batch, index, chain, along.num_chains, along.max_num_nodes)
