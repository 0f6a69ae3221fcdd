"""The shell of every network that mixes the tokens of sequences: what lies between what users give and (rows, T)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ... import checks
from ...orders import ORDERS, check_order, radial_order
from ...precision import full_precision
from ...sequences import Sequences
from .local_context import Edges

Network = Callable[[Tensor, Tensor, Sequences, "Edges | None"], Tensor]


@dataclasses.dataclass(frozen=True)
class TokenShell:
    """Checks and centres positions, finds or checks the order, checks edges, runs a network, zeroes the padding.

    Rows may be in any layout, by grade or as e3nn's irreps: the shell asks only which of them are invariant.

    Args:
        order: of the tokens along their sequence, ``"input"`` or ``"radial"``.
        invariants: ranges of rows that motions leave alone, which tell equally far tokens apart.
        needs_positions: whether part of the output would be zero without positions.
        local_context: whether the network takes edges.
        edge_channels: scalars of an edge.
        pools: whether the output is of whole sequences.
    """

    order: str
    invariants: tuple[tuple[int, int], ...]
    needs_positions: bool = False
    local_context: bool = False
    edge_channels: int = 0
    pools: bool = False

    def __post_init__(self) -> None:
        checks.choice("order", self.order, ORDERS)

    def run(
        self,
        network: Network,
        x: Tensor,
        pos: Tensor | None,
        sequences: Sequences,
        *,
        reference: Tensor,
        order: Tensor | None = None,
        edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """The output (rows, T), or (rows, B) where the network pools.

        Args:
            network: ``network(x, pos, sequences, edges)`` with positions (3, T) relative to the mean of their sequence,
                zero where there are none, and ``edges`` None without local context.
            x: tokens ``(rows, T)``, of a checked shape and kind.
            pos: ``(T, 3)``.
            sequences: which tokens belong together.
            reference: a parameter of the network, in whose dtype it computes.
            order: int64 ``(T,)``, in place of the shell's.
            edge_index: ``(2, E)``, source and target.
            edge_attr: ``(E, edge_channels)``, or ``(E,)`` for one channel.
        """
        checks.full_parameters(reference)
        radial = order is None and self.order == "radial"
        if pos is None and self.needs_positions:
            raise ValueError(
                "pos must be given: without positions no vectors enter, and part of the output would be zero; got None"
            )
        if pos is None and radial:
            raise ValueError("pos must be given with order='radial', got None")
        with full_precision(x.device):
            x = sequences.zero_padding(x.to(reference.dtype))
            if pos is None:
                pos = x.new_zeros(3, sequences.tokens)
            else:
                pos = checks.positions(pos, (sequences.tokens, 3), x, "")
                pos = sequences.zero_padding((pos if pos.is_floating_point() else pos.double()).T)
                if radial:
                    order = radial_order(pos, sequences, torch.cat([x[:0], *(x[a:b] for a, b in self.invariants)]))
                    sequences = sequences.ordered(order)
                pos = pos.to(torch.promote_types(pos.dtype, x.dtype))
                pos = sequences.zero_padding(sequences.centred(pos).to(x.dtype))
            if order is not None and not radial:
                check_order(order, sequences)
                sequences = sequences.ordered(order)
            edges = self._edges(edge_index, edge_attr, x, sequences)
            out = network(x, pos, sequences, edges)
            return out if self.pools else sequences.zero_padding(out)

    def _edges(
        self, edge_index: Tensor | None, edge_attr: Tensor | None, x: Tensor, sequences: Sequences
    ) -> Edges | None:
        if (edge_index is not None) != self.local_context:
            wanted = "given with local_context=True" if edge_index is None else "None without local_context=True"
            raise ValueError(f"edge_index must be {wanted}, got {'None' if edge_index is None else 'edges'}")
        if (edge_attr is not None) != bool(self.edge_channels):
            came = "None" if edge_attr is None else "some"
            raise ValueError(f"edge_attr must have edge_channels={self.edge_channels} scalars an edge, got {came}")
        if edge_index is None:
            return None
        _check_pairs(edge_index, sequences)
        if edge_attr is None:
            return Edges(edge_index, x.new_zeros(0, edge_index.shape[1]))
        if not isinstance(edge_attr, Tensor):
            raise ValueError(f"edge_attr must be a tensor, got {type(edge_attr).__name__}")
        edge_attr = edge_attr[:, None] if edge_attr.ndim == 1 else edge_attr
        shape = edge_index.shape[1], self.edge_channels
        if tuple(edge_attr.shape) != shape or edge_attr.is_complex():
            raise ValueError(
                f"edge_attr must be real numbers of shape {shape}, got {edge_attr.dtype} of {tuple(edge_attr.shape)}"
            )
        if edge_attr.device != x.device:
            raise ValueError(f"edge_attr must be on {x.device} as the input is, got {edge_attr.device}")
        return Edges(edge_index, edge_attr.to(x.dtype).T)


def _check_pairs(edge_index: Tensor, sequences: Sequences) -> None:
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"edge_index must be a tensor, got {type(edge_index).__name__}")
    if edge_index.dtype != torch.int64 or edge_index.ndim != 2 or len(edge_index) != 2:
        raise ValueError(f"edge_index must be int64 (2, E), got {edge_index.dtype} of shape {tuple(edge_index.shape)}")
    if edge_index.device != sequences.batch.device:
        raise ValueError(f"edge_index must be on {sequences.batch.device} as the input is, got {edge_index.device}")
    if not checks.values_are_free(edge_index) or not edge_index.numel():
        return
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= sequences.tokens:
        raise ValueError(f"edge_index must join nodes in [0, {sequences.tokens}), got {low} to {high}")
    if bool((sequences.batch[edge_index[0]] != sequences.batch[edge_index[1]]).any()):
        raise ValueError("edge_index must join nodes of the same graph, got an edge between two")
    if sequences.mask is not None and not bool(sequences.mask[edge_index].all()):
        raise ValueError("edge_index must join tokens that exist, got one beyond its sequence's length")
