"""Whether one of torch's transforms of functions is at work."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def _functorch() -> bool:
    return torch._C._are_functorch_transforms_active()


# What torch.compiler.assume_constant_result does, which would load all of the compiler here: called while tracing.
_functorch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transformed() -> bool:
    """Whether a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp`` and what is made of them) or a level of
    forward-mode differentiation is at work, in eager execution and while torch.compile traces."""
    return _functorch() or forward_ad._current_level >= 0
