"""Which path computes an operator: torch by its own operator, a fused Triton kernel, or a plain composition.

Operators of our own are opaque to torch's transforms: ``torch.func``'s cannot look into them, and forward-mode
differentiation would take their tangents for zero. So each has its plain composition of torch's operations, which every
transform understands; it is what runs wherever a transform is at work, and where ``backend="plain"`` asks for it.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch.autograd import forward_ad

from .. import checks
from ..modes import transformed

# "auto" is what was measured faster on the device: of no operator a kernel yet
BACKENDS = ("auto", "torch", "triton", "plain")

INSTALLED = importlib.util.find_spec("triton") is not None  # Triton
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its kernels run on the CPU


def check_backend(backend: str, without: str = "") -> None:
    """ValueError for an unknown backend, or Triton's where it is not installed or ``without`` says what has no
    kernel."""
    checks.choice("backend", backend, BACKENDS)
    if backend == "triton" and (without or not INSTALLED):
        why = f"with {without}" if without else "without Triton (pip install triton)"
        raise ValueError(f"backend must be 'auto', 'torch' or 'plain' {why}, got 'triton'")


def use_triton(backend: str, device: torch.device) -> bool:
    """Whether an operator runs on its kernel for tensors on ``device``."""
    check_backend(backend)
    if backend == "triton" and device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        raise ValueError(
            "backend must be 'auto', 'torch' or 'plain' for tensors that are not on a CUDA device (or set "
            f"TRITON_INTERPRET=1 to run kernels on the CPU, slowly), got 'triton' with tensors on {device}"
        )
    return backend == "triton"


def use_plain(backend: str = "auto") -> bool:
    """Whether an operator runs as its plain composition of torch's operations."""
    return backend == "plain" or transformed()


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
