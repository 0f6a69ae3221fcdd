"""Group elements of queries, keys and outputs of attention, in axes that broadcast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Elements:
    r"""The group elements of queries, keys and outputs.

    Scores have three axes of elements ``(H, T, S)``: output elements h, query elements t (each output is a sum over
    them) and key elements s. Queries have ``Q`` elements, and keys and values have ``K``.

    ============================== ======= ======= ======= ============== ==========
    relation                       H       T       S       query of (h,t) key of s
    ============================== ======= ======= ======= ============== ==========
    ``"frame"``                    \|H\|   1       1       h              h
    ``"relative"``                 \|H\|   1       \|H\|   h              s
    lifting                        \|H\|   1       1       0              0
    ``"lifted"``, ge_vit, gsa      \|H\|   \|H\|   \|H\|   t              s
    ============================== ======= ======= ======= ============== ==========

    ``index`` is the element u of each score, a permutation along s. It is zero if no encoding depends on u.
    ``paired`` is true if output h has one query, of element h.
    """

    outputs: int
    queries: int
    keys: int
    paired: bool
    index: Int[Tensor, "H T S"]

    @classmethod
    def of(
        cls, index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None, query: Float[Tensor, "B e C Q ..."], outputs: int
    ) -> Elements:
        """The elements for the ``index`` of a relation. ``None`` means frame attention or lifting; ``query`` then has
        ``outputs`` elements or one."""
        if index is None:
            none = torch.zeros(outputs, 1, 1, dtype=torch.int64, device=query.device)
            return cls(outputs, 1, 1, query.shape[3] == outputs, none)
        queries = index.shape[1] if index.ndim == 3 else 1
        return cls(outputs, queries, index.shape[-1], index.ndim == 2, index.view(outputs, queries, -1))

    def of_outputs(self, some: slice) -> Elements:
        """The same for a slice of the outputs."""
        index = self.index[some]
        return replace(self, outputs=len(index), index=index)

    def of_query(self, x: Float[Tensor, "b e C Q *pixels"], t: int) -> Float[Tensor, "b e C #H *pixels"]:
        """The t-th query of every output."""
        return x if self.paired else x.narrow(3, t, 1)

    def of_keys(self, x: Float[Tensor, "b e C K *pixels"]) -> Float[Tensor, "b e C #H S *pixels"]:
        """The keys or values of every output."""
        return x.unsqueeze(4) if self.keys == 1 else x.unsqueeze(3)

    def by_key(self, x: Tensor, t: int, axis: int) -> Tensor:
        """Gather logits of u, whose axes from ``axis`` on are (H or 1, U), into logits of key elements, (H, S)."""
        return self._permuted(x, self.index[:, t], axis)

    def by_argument(self, x: Tensor, t: int, axis: int) -> Tensor:
        """The adjoint of :meth:`by_key`, for gradients: axes (H, S) from ``axis`` on -> (H, U)."""
        return self._permuted(x, self.index[:, t].argsort(-1), axis)

    def _permuted(self, x: Tensor, order: Tensor, axis: int) -> Tensor:
        """x[h or 0, order[h]] along two axes."""
        if x.shape[axis] == self.outputs:
            order = order + x.shape[axis + 1] * torch.arange(self.outputs, device=x.device)[:, None]
        return x.flatten(axis, axis + 1).index_select(axis, order.flatten()).unflatten(axis, (self.outputs, -1))
