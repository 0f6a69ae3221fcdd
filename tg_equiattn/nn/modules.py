"""What modules of all families have in common."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every child that has it, and of the children of the others."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


class NotScriptable:
    """A mixin for modules that ``torch.jit.script`` refuses with what to use instead, alone and inside others."""

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks of a module and of all in it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not support TorchScript (torch.jit.script): use torch.compile, or "
            "torch.export to run a model without Python"
        )


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
