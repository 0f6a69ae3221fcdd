"""The form in which an operator is computed, and how much of it is in memory at once.

An operator is opaque to torch's transforms: those of ``torch.func`` cannot look into it, and forward-mode
differentiation would take its tangents for zero. So every operator has a definition in torch's own operations, which
runs in all transforms. While torch.compile traces for an accelerator, a form that compilers fuse into a few kernels
replaces the operator, which launches many.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..modes import in_functorch_transform, is_exporting

FEW_NUMBERS = 1 << 13  # that a CPU computes in the time that it takes to call an operator
_TILE_BYTES = 2 << 30  # what the tensors of a tile may take together on an accelerator
DEFINITION, OPERATOR, FUSABLE = "definition", "operator", "fusable"


def choose_form(x: Tensor, numbers: int, plain: bool = False, few: bool = False) -> str:
    """The form of an operator: ``DEFINITION``, ``OPERATOR`` or ``FUSABLE``.

    Args:
        x: an operand, on the device where the operator runs.
        numbers: size of each of the four large tensors that the fusable form makes. It is chosen if they fit in memory.
        plain: ask for the definition.
        few: ask for the definition where ``numbers`` are so few that a CPU takes longer to call the operator. Dispatch
            modes, which count or trace operations, see the operator.
    """
    if use_plain(plain):
        return DEFINITION
    on_cpu, compiling = x.device.type == "cpu", torch.compiler.is_compiling()
    observed = compiling or torch._C._len_torch_dispatch_stack()
    if few and on_cpu and not observed and 0 < numbers <= FEW_NUMBERS:
        return DEFINITION
    if on_cpu or not compiling or is_exporting():
        return OPERATOR  # exported programs are for all sizes, so that no size can decide
    return FUSABLE if numbers <= tile_numbers(x.device, 0, 4) else OPERATOR


def use_plain(plain: bool = False) -> bool:
    """True if an operator without a fusable form runs as its definition."""
    return plain or in_functorch_transform()


def tile_numbers(device: torch.device, on_cpu: int, tensors: int) -> int:
    """The number of elements that each large tensor of a chunk may have.

    A CPU wants chunks that stay in its cache, an accelerator few launches.

    Args:
        device: the device.
        on_cpu: the answer on a CPU.
        tensors: number of large tensors, which share 2 GiB in float32 on other devices.
    """
    return on_cpu if device.type == "cpu" else _TILE_BYTES // (4 * tensors)


def refuse_forward_mode() -> None:
    """RuntimeError inside one of our own operators in forward-mode differentiation.

    Operators have no forward-mode rule, and torch would take their tangents for zero without a word. A layer or a
    function of ours never gets here; a compiled or exported program does, and the backward of an earlier graph.
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode differentiation cannot go through an operator of tg_equiattn in a compiled or exported "
            "program, or in the backward of a graph recorded before it began: tangents would be zero. Transform the "
            "module itself, and compile after that"
        )
