"""Making tensors that are kept from one call to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


@contextlib.contextmanager
def ordinary_tensors(*inputs: Tensor) -> Iterator[None]:
    """Make ordinary tensors, of no inputs or of ordinary ones, wherever the call comes from.

    What is kept may be asked for in evaluation first, and trained with later; and within a transform of ``torch.func``,
    whose own tensors end with it.
    """
    ordinary = not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in inputs)
    outside = temporarily_clear_interpreter_stack() if ordinary else contextlib.nullcontext()
    with torch.inference_mode(False), outside:
        yield
