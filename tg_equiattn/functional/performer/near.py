"""What near pairs add to attention: their biases, and sums over them of what pairs have."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from ...neighbors import NeighborList
from .edge_products import edge_sum


class Near(NamedTuple):
    """Near pairs with their biases (heads, E), those of nodes with themselves (heads, 1 or N) and that of all pairs
    (heads,); and what they add to values: features of pairs (E, r), of a node with itself (r,), and their map
    (heads, r, e)."""

    pairs: NeighborList
    bias: Tensor
    self_bias: Tensor
    far_bias: Tensor
    values: tuple[Tensor, Tensor, Tensor] | None = None

    def added_values(self, weights: Tensor, own: Tensor) -> Tensor:
        """Sums of values (heads, N, e) by weights of pairs (heads, E) and of nodes with themselves (heads, N, 1)."""
        features, itself, mapped = (t.to(weights.dtype) for t in cast("tuple[Tensor, ...]", self.values))
        relation, entries = self.pairs.incidence(len(weights))
        sums = edge_sum(weights.flatten()[None].index_select(1, entries), features[None], relation)
        return (sums[0].unflatten(0, (-1, len(weights))).transpose(0, 1) + own * itself) @ mapped
