"""Layer normalisation that torch's transforms may be nested over."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .transforms import transformed


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``, written out under transforms.

    Nested transforms of ``torch.func`` and nested forward-mode differentiation take the mean and the deviation inside
    torch's own operator for constants, and their second derivatives are wrong without a word (pytorch issue 196700).
    """

    def forward(self, input: Tensor) -> Tensor:
        if not transformed():
            return super().forward(input)
        axes = tuple(range(-len(self.normalized_shape), 0))
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - wide.mean(axes, keepdim=True)
        out = centred * (centred.square().mean(axes, keepdim=True) + self.eps).rsqrt()
        return (out * self.weight + self.bias).to(input.dtype)
