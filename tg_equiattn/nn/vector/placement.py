"""Preparation of tokens for operators: tokens of a chain are contiguous and in order, and positions are centred."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, cat

from ... import checks
from ...modes import is_concrete, runs_eagerly
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from ...orders import radial_order
from ...slots import Slots
from .sequences import ChainArguments, Sequences, by_chain, sequences_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int


_LENGTHS = 0.1, 10  # between which steps between neighbors are of about unit size
_SOME = 64  # nodes whose nearest neighbors are looked for


class PositionUnit:
    """The length that positions are divided by. At its first use on the CPU, it warns if neighbors are not about this
    far apart.

    Args:
        length: the length, in the unit of positions.
        in_space: true for operators without an order: neighbors are then the nearest nodes, instead of the next ones.
    """

    def __init__(self, length: float, in_space: bool) -> None:
        checks.positive_number(length=length)
        self.length, self.in_space, self.checked = float(length), in_space, False

    def check(
        self, pos: Float[Tensor, "tokens 3"], node_batch: NodeBatch, chain: Int[Tensor, " tokens"] | None
    ) -> None:
        """Warn at the first use. ``pos``, which has been divided, and ``chain`` are in the order of the sequence."""
        if not runs_eagerly() or self.checked or not is_concrete(pos) or not node_batch.nodes:
            return
        valid = slice(None) if node_batch.mask is None else node_batch.mask
        pos, graph = pos.detach()[valid], node_batch.batch[valid]
        if self.in_space:
            pos = pos[graph == graph[:1]]
            far = torch.cdist(pos[:_SOME], pos, compute_mode="donot_use_mm_for_euclid_dist")  # exact for near ones
            steps = far.fill_diagonal_(torch.inf).amin(1) if len(pos) > 1 else pos[:0, 0]
        else:
            chain = torch.zeros_like(graph) if chain is None else chain[valid]
            steps = pos.diff(dim=0).norm(dim=1)[(graph.diff() == 0) & (chain.diff() == 0)]
        size = steps.square().mean().sqrt().item() if len(steps) else 0.0
        self.checked = size > 0
        if self.checked and not _LENGTHS[0] <= size <= _LENGTHS[1]:
            kind = "nearest in space" if self.in_space else "along the chain"
            warnings.warn(
                f"length={self.length:g} is not of the size of pos: steps between neighbors ({kind}) are "
                f"{size * self.length:.3g} (root mean square), and should be between {_LENGTHS[0]} and {_LENGTHS[1]} "
                f"lengths; pass length={size * self.length:.2g}, the spacing of neighbors in the unit of pos",
                stacklevel=2,
            )


class TokenBatch(NamedTuple):
    """Data of tokens that operators need in addition to features.

    Attributes:
        pos: positions relative to the mean of the graph, divided by the length of the module; zero for padding and
            without positions.
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
    unit: PositionUnit,
    no_ring: str,
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
        unit: the length that positions are divided by.
        no_ring: the setting of the module that rules out rings; empty if there is none.
    """
    along.check(node_batch, by, no_ring)
    if pos is None and needs_positions:
        raise ValueError(
            "pos must be given, got None: without positions and vectors, part of the output would always be zero"
        )
    if pos is not None and causal:
        raise ValueError(
            "pos must be None with causal=True, got positions: they are relative to the mean over all tokens, which "
            "later tokens change; pass differences of positions as vectors"
        )
    given, order, radial = pos is not None, along.order, along.order is None and by == "radial"
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
        pos = (node_batch.centred(pos) / unit.length).to(x.dtype)
    order, sequences = order_and_sequences(node_batch, along, order)
    slots, chain = None, along.chain
    if order is not None:
        slots, chain = Slots.of_order(order), None if chain is None else chain[order]
        x, pos = slots.pack(x), slots.pack(pos)
    if given:
        unit.check(pos, node_batch, chain)
    return x, TokenBatch(pos, node_batch, sequences, slots)


def order_and_sequences(
    node_batch: NodeBatch, along: ChainArguments, order: Int[Tensor, " tokens"] | None
) -> tuple[Int[Tensor, " tokens"] | None, Sequences]:
    """The order of the tokens, by chain if there are chains and else the given one, and the sequences of tokens in this
    order."""
    index, chain = along.index, along.chain
    ring = along.ring if isinstance(along.ring, Tensor) else None  # the check has made a tensor of a bool
    if chain is not None:
        order = by_chain(node_batch, chain)
        index, chain, ring = (None if x is None else x[order] for x in (index, chain, ring))
    return order, sequences_of(node_batch, index, chain, along.num_chains, along.max_num_nodes, ring)
