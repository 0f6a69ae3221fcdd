"""Modules that can be told which pixels of an image there are."""

from __future__ import annotations

from torch import Tensor, nn


class Masked:
    """A mixin for modules whose ``forward`` takes a ``mask`` of pixels, bool (B or 1, *spatial), and puts zeros where
    there are none."""

    def mask_after(self, mask: Tensor) -> Tensor:
        """Which pixels of the output there are."""
        return mask


class MaskedSequential(Masked, nn.Sequential):
    """Modules in turn; those that can be told are told which pixels there are."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for module in self:
            if mask is None or not isinstance(module, Masked):
                x = module(x)
            else:
                x, mask = module(x, mask), module.mask_after(mask)  # type: ignore[operator]
        return x

    def mask_after(self, mask: Tensor) -> Tensor:
        for module in self:
            mask = module.mask_after(mask) if isinstance(module, Masked) else mask
        return mask
