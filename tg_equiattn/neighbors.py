"""Names that :mod:`tg_equiattn.pairs` replaces."""

from __future__ import annotations

import torch
from torch import Tensor

from .pairs import CSR as Pattern  # noqa: N811
from .pairs import Pairs
from .pairs import near_pairs as _near_pairs

__all__ = ["Neighbors", "Pattern", "near_pairs"]


class Neighbors(Pairs):
    """:class:`Pairs` of targets and sources."""

    def __init__(self, target, source, offsets, nodes, exists=None, features=None, weights=None):
        edge_index = torch.stack([source, target])
        super().__init__(edge_index, nodes, offsets, exists=exists, features=features, weights=weights)


def near_pairs(pos: Tensor, max_distance: float, **options) -> tuple[Tensor, Tensor]:
    """Targets and sources."""
    (source, target), _ = _near_pairs(pos, max_distance, **options)
    return target, source
