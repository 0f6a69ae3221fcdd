"""What whole models do to the modules within them."""

from __future__ import annotations

from torch import nn


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every child that has it, and of the children of the others."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)
