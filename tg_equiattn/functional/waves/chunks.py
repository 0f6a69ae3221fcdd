"""Sums in chunks, so that not all of their terms are in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from ... import checks, modes


def in_one_chunk(x: Tensor) -> bool:
    """True if a sum must not be split: sizes of traced tensors are symbols, and transforms of ``torch.func`` cannot go
    through checkpoints."""
    return checks.is_traced(x) or modes.in_functorch_transform()


def checkpointed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """``function(*arguments)``, which backward computes a second time instead of keeping intermediate results."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
