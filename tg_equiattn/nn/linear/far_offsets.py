"""What all nodes of a graph add to values: the weighted means of their offsets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...precision import full_precision


class FarOffsets(nn.Module):
    r"""Outputs from each head's weighted mean :math:`o_e` of the offsets of all nodes, (N, heads, dim).

    A linear map of the means; where ``invariant``, of their inner products :math:`g_{ef} = \langle o_e, o_f \rangle`,
    :math:`e \le f`, as :math:`g / (1 + g^2)^{1/4}`: smooth, and growing as lengths do. Maps start at zero.

    Args:
        heads: of attention.
        pos_dim: dimension of offsets.
        out_channels: of the output.
        invariant: whether outputs are invariant to rotations.
    """

    pairs: Tensor

    def __init__(self, heads: int, pos_dim: int, out_channels: int, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant
        if invariant:
            self.register_buffer("pairs", torch.triu_indices(heads, heads), persistent=False)
        self.map = nn.Linear(heads * (heads + 1) // 2 if invariant else heads * pos_dim, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.map.weight)

    def forward(self, means: Tensor) -> Tensor:
        with full_precision(means.device):
            means = means.to(self.map.weight.dtype)
            if not self.invariant:
                return self.map(means.flatten(1))
            first, second = self.pairs
            products = (means @ means.mT)[:, first, second]
            return self.map(products * (1 + products.square()) ** -0.25)
