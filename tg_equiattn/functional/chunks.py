"""Work in chunks, so that not all intermediate results are in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from ..modes import is_traced, runs_eagerly

if TYPE_CHECKING:
    pass


def is_whole(x: Tensor) -> bool:
    """True if work on x must be one chunk: traced tensors have symbols for sizes, and compilers unroll loops."""
    return is_traced(x) or not x.numel()


def checkpointed(function: Callable[..., Any], *arguments: Any, preserve_rng_state: bool = False) -> Any:
    """``function(*arguments)`` with a checkpoint: backward computes intermediate results again.

    Compilers and transforms of ``torch.func`` do not support checkpoints; there, intermediate results are kept.

    Args:
        function: a function of tensors.
        arguments: its arguments.
        preserve_rng_state: set it if the function draws random numbers, so that backward draws the same ones again.
    """
    if not torch.is_grad_enabled() or not runs_eagerly():
        return function(*arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    return torch.utils.checkpoint.checkpoint(function, *arguments, **options)


def joined(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join the results of chunks. Often there is one, which is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
