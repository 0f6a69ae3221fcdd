"""Outputs of attention to the offsets of all nodes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...modes import full_precision
from ...tables import Tables

if TYPE_CHECKING:
    from jaxtyping import Float


class FarOffsets(nn.Module):
    r"""A smooth map from the weighted mean offsets :math:`o_e` of all heads to outputs. It starts at zero.

    The outputs are a linear map of the mean offsets. If ``invariant``, they are a linear map of
    :math:`g / (1 + g^2)^{1/4}` with the inner products g of mean offsets between heads.
    """

    def __init__(self, heads: int, pos_dim: int, out_channels: int, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant
        if invariant:
            self.pairs = Tables(functools.partial(torch.triu_indices, heads, heads))
        self.map = nn.Linear(heads * (heads + 1) // 2 if invariant else heads * pos_dim, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.map.weight)

    def forward(self, means: Float[Tensor, "heads nodes dim"]) -> Float[Tensor, "nodes channels"]:
        with full_precision(means.device):
            means = means.to(self.map.weight.dtype)
            if not self.invariant:
                return self.map(means.transpose(0, 1).flatten(1))
            means = means.mT.contiguous()  # sums over the last axis, of a few numbers, are slow
            first, second = (means.index_select(0, heads) for heads in self.pairs(means.device))
            products = (first * second).sum(1)
            return self.map((products * (1 + products.square()).sqrt().rsqrt()).T)
