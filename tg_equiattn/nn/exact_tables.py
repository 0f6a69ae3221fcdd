"""Modules with tables of numbers that are known exactly."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ExactTables(nn.Module):
    """A module whose tables are made anew where it moves to another precision: what float32 has lost would otherwise
    break in float64 what is promised there."""

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def add_table(self, name: str, exact: Tensor) -> None:
        """A non-persistent buffer with these numbers, given in float64."""
        self._exact[name] = exact
        self.register_buffer(name, exact.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        for name, exact in self._exact.items():
            table = getattr(self, name)
            setattr(self, name, exact.to(table.device, table.dtype))
        return self
