"""What whole models do to the modules within them."""

from __future__ import annotations

import torch
from torch import nn

from .random_features import RandomFeatures


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every child that has it, and of the children of the others."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


def redraw_children(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw new random features everywhere within a module, one after the other."""
    for child in module.modules():
        if isinstance(child, RandomFeatures):
            child.redraw_features(generator)
