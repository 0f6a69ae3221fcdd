"""Sums in blocks, so that not all of their terms are in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from ... import checks
from ...modes import in_functorch_transform


def in_one_piece(x: Tensor) -> bool:
    """Whether a sum must not be cut into blocks: sizes of traced tensors are symbols, and transforms of ``torch.func``
    cannot go through checkpoints."""
    return checks.is_traced(x) or in_functorch_transform()


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """``function(*arguments)``, which backward computes again instead of keeping intermediate results."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
