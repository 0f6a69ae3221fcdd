"""Whether one of torch's transforms of functions is at work."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result
def _functorch() -> bool:
    return torch._C._are_functorch_transforms_active()


def transformed() -> bool:
    """Whether a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp`` and what is made of them) or a level of
    forward-mode differentiation is at work, in eager execution and while torch.compile traces."""
    return _functorch() or forward_ad._current_level >= 0
