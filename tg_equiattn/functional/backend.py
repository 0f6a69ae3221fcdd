"""Choice of the form in which an operator is computed, and of the size of its chunks.

An operator is opaque to torch's transforms: those of ``torch.func`` cannot look into it, and forward-mode
differentiation would take its tangents for zero. So every operator has a definition in torch's own operations, which
runs in all transforms. While torch.compile traces for an accelerator, the definition replaces the operator, too: a
compiler fuses it into a few kernels, and an operator launches many.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..modes import in_functorch_transform, is_exporting

FEW_NUMBERS = 1 << 13  # a CPU computes this many numbers in the time of a call of an operator
_TILE_BYTES = 2 << 30  # memory of all tensors of a chunk on an accelerator
DEFINITION, OPERATOR = "definition", "operator"


def choose_form(x: Tensor, numbers: int, plain: bool = False) -> str:
    """The form of an operator: ``DEFINITION`` or ``OPERATOR``.

    Args:
        x: an operand, on the device where the operator runs.
        numbers: size of each of the four large tensors that a compiled definition makes. Compilers for accelerators get
            the definition if they fit in memory.
        plain: ask for the definition.
    """
    if use_plain(plain):
        return DEFINITION
    if x.device.type == "cpu" or not torch.compiler.is_compiling() or is_exporting():
        return OPERATOR  # exported programs are for all sizes, so that no size can decide
    return DEFINITION if numbers <= tile_numbers(x.device, 0, 4) else OPERATOR


def are_few(numbers: int) -> bool:
    """True if a CPU computes so many numbers in the time of a call of an operator."""
    return 0 < numbers <= FEW_NUMBERS


def use_plain(plain: bool = False) -> bool:
    """True if an operator runs as its definition: if asked to, and in transforms."""
    return plain or in_functorch_transform()


def tile_numbers(device: torch.device, on_cpu: int, tensors: int) -> int:
    """The number of elements that each large tensor of a chunk may have.

    Chunks should stay in the cache of a CPU; on an accelerator they should be large, so that there are few launches.

    Args:
        device: the device.
        on_cpu: the number on a CPU.
        tensors: number of large tensors. On other devices they share 2 GiB, in float32.
    """
    return on_cpu if device.type == "cpu" else _TILE_BYTES // (4 * tensors)


def refuse_forward_mode() -> None:
    """Raise RuntimeError in forward-mode differentiation. Every operator calls this function.

    Operators have no forward-mode rule, and torch would take their tangents for zero without a warning. Layers and
    functions of the library use definitions instead, so only compiled or exported programs, and the backward of a graph
    recorded earlier, call operators in forward-mode differentiation.
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode differentiation cannot go through an operator of tg_equiattn in a compiled or exported "
            "program, or in the backward of a graph recorded before it began: tangents would be zero. Transform the "
            "module itself, and compile after that"
        )
