"""Networks on tokens by grade, and what brings users' tokens to them: centred positions, an order, checked edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...modes import full_precision
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from ...orders import ORDERS, check_order, radial_order
from ..modules import StoresSettings, reset_children
from .grades import POSITION, Grades


def place_tokens(
    x: Tensor,
    pos: Tensor | None,
    node_batch: NodeBatch,
    order: Tensor | None,
    *,
    by: str,
    invariants: Sequence[slice],
    needs_positions: bool,
) -> tuple[Tensor, Tensor, NodeBatch]:
    """Tokens and positions relative to the mean of their sequence, zero for padding or where there are none, and the
    sequences in ``order``, or ``by`` radius with columns ``invariants`` to tell equally far tokens apart."""
    if pos is None and needs_positions:
        raise ValueError(
            "pos must be given: without positions no vectors enter, and part of the output would be zero; got None"
        )
    radial = order is None and by == "radial"
    if pos is None and radial:
        raise ValueError("pos must be given with order='radial', got None")
    x = node_batch.zero_padding(x)
    if pos is None:
        pos = x.new_zeros(node_batch.nodes, 3)
    else:
        pos = checks.positions(pos, (node_batch.nodes, 3), x, "")
        pos = node_batch.zero_padding(pos if pos.is_floating_point() else pos.double())
        if radial:
            scalars = torch.cat([x[:, :0], *(x[:, part] for part in invariants)], 1)
            node_batch = node_batch.ordered(radial_order(pos, node_batch, scalars))
        pos = node_batch.centred(pos).to(x.dtype)
    if order is not None:
        check_order(order, node_batch)
        node_batch = node_batch.ordered(order)
    return x, pos, node_batch


class TokenNetwork(StoresSettings, ABC):
    """Tokens of some grades to tokens, or pooled to whole sequences, of others; its last layers are ``out``."""

    out: nn.Module

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        *,
        order: str = "input",
        pool: str | None = None,
        local_context: bool = False,
        edge_channels: int = 0,
    ) -> None:
        super().__init__()
        checks.choice("order", order, ORDERS)
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.in_grades, self.out_grades, self.order, self.pool = in_grades, out_grades, order, pool
        self.local_context, self.edge_channels = local_context, edge_channels

    @abstractmethod
    def forward(self, x: Tensor, pos: Tensor, node_batch: NodeBatch, edges: NeighborList | None = None) -> Tensor:
        """x (T, dim) and centred positions (T, 3) to (T, dim), or (B, dim) if pooled."""

    def run(
        self,
        x: Tensor,
        pos: Tensor | None,
        node_batch: NodeBatch,
        order: Tensor | None,
        edge_index: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        """:meth:`forward` of what users give, once x (T, dim) is known to be right."""
        reference = self.reference_parameter
        checks.full_parameters(reference)
        with full_precision(x.device):
            x, pos, node_batch = place_tokens(
                x.to(reference.dtype), pos, node_batch, order, by=self.order,
                invariants=[slice(0, self.in_grades.scalars)],
                needs_positions=self.reachable(self.in_grades) != self.out_grades,
            )  # fmt: skip
            out = self(x, pos, node_batch, self._edges(edge_index, edge_attr, node_batch))
            return out if self.pool else node_batch.zero_padding(out)

    def _edges(self, edge_index: Tensor | None, edge_attr: Tensor | None, node_batch: NodeBatch) -> NeighborList | None:
        if (edge_index is not None) != self.local_context:
            wanted = "given with local_context=True" if edge_index is None else "None without local_context=True"
            raise ValueError(f"edge_index must be {wanted}, got {'None' if edge_index is None else 'edges'}")
        if (edge_attr is not None) != bool(self.edge_channels):
            came = "None" if edge_attr is None else "some"
            raise ValueError(f"edge_attr must have edge_channels={self.edge_channels} scalars an edge, got {came}")
        if edge_index is None:
            return None
        return NeighborList.from_edges(
            edge_index, node_batch.nodes, batch=node_batch.batch, node_mask=node_batch.mask,
            edge_dim=self.edge_channels, features=edge_attr, loops=True,
        )  # fmt: skip

    def reachable(self, given: Grades) -> Grades:
        """Which output grades can differ from zero where only these input grades do."""
        return self.out_grades

    def check_reachable(self, name: str) -> None:
        """ValueError naming what users call the output, where part of it would be zero whatever comes in."""
        reachable = self.reachable(self.in_grades.plus(POSITION))
        parts = zip(("0e", "1o", "1e", "0o"), self.out_grades, reachable, strict=True)
        lost = [part for part, wanted, found in parts if wanted and not found]
        if lost:
            raise ValueError(
                f"{name} must be reachable by geometric products, got {' + '.join(lost)} that would always be zero: "
                "have it among the hidden channels"
            )

    def settings(self) -> dict[str, Any]:
        return {"order": self.order, "pool": self.pool}

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return next(self.out.parameters())

    def reset_parameters(self) -> None:
        reset_children(self)
