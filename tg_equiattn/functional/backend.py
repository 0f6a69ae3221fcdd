"""Which path computes an operator of our own: itself, or a plain composition of torch's operations.

Operators are opaque to torch's transforms: ``torch.func``'s cannot look into them, and forward-mode differentiation
would take their tangents for zero. So each has its plain composition, which every transform understands; it is what
runs wherever a transform is at work, and where it is asked for. On accelerators compilers get it too: they make a few
kernels of what an operator launches one by one.

How much is worked through at once hangs on the device: a CPU wants tiles that stay in its cache, an accelerator few
launches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..modes import in_functorch_transform


def use_plain(plain: bool = False) -> bool:
    """Whether an operator runs as its plain composition of torch's operations."""
    return plain or in_functorch_transform()


_TILE_BYTES = 2 << 30  # what the tensors of a tile may take together on an accelerator


def tile_numbers(device: torch.device, on_cpu: int, tensors: int) -> int:
    """How many numbers each of a tile's so many large tensors may have: ``on_cpu`` there, elsewhere as many float32 as
    fit in 2 GiB."""
    return on_cpu if device.type == "cpu" else _TILE_BYTES // (4 * tensors)


def compiles_for_accelerator(x: Tensor) -> bool:
    """Whether torch.compile traces for an accelerator. Not export, whose graphs are for all sizes: none decides."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and x.device.type != "cpu"


def compiler_fuses(x: Tensor, numbers: int) -> bool:
    """Whether an operator is left to the compiler as its plain composition: while one traces for an accelerator, where
    all at once, with so many ``numbers`` in each of four tensors, is no more than a tile."""
    return compiles_for_accelerator(x) and numbers <= tile_numbers(x.device, 0, 4)


def refuse_forward_mode() -> None:
    """RuntimeError inside one of our own operators while forward-mode differentiation is at work.

    Operators have no forward-mode rule, and torch would take their tangents for zero without a word. A layer or a
    function of ours never gets here; a compiled or exported program does, and the backward of an earlier graph.
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode differentiation cannot go through an operator of tg_equiattn in a compiled or exported "
            "program, or in the backward of a graph recorded before it began: tangents would be zero. Transform the "
            "module itself, and compile after that"
        )
