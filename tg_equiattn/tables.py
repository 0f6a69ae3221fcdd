"""Tables that follow from a module's arguments: index tables, geometry, column maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .modes import as_fake, ordinary_tensors


class Tables(nn.Module):
    """Tensors that are functions of a module's arguments, and therefore neither parameters, buffers nor state.

    Tables are built once, on the CPU, when the module is constructed. Every device and dtype gets a copy when the
    module moves there or when a call first asks for it. No training tool sees the tables: averages of weights and
    buffers, ``to_empty``, ``load_state_dict(assign=True)`` and construction on the meta device leave them as they are.

    Args:
        build: a function without arguments that returns a tensor or a tuple of tensors, floating point ones in
            float64. Pickle stores it in place of the tables: a module-level function, or a ``functools.partial`` of
            one.

    Example:
        >>> tables = Tables(lambda: torch.arange(3))
        >>> tables(torch.device("cpu"))
        tensor([0, 1, 2])
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        self._build = build
        with torch.device("cpu"), ordinary_tensors():
            self._exact = build()
        self._copies: dict[tuple[torch.device, torch.dtype | None], Any] = {}
        self._kind = torch.device("cpu"), torch.get_default_dtype()  # where the module is
        self._copy_to_module()

    def forward(self, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        """The tables on a device.

        Args:
            device: the device of the input, not of the module: ``torch.func.functional_call`` may run a module of the
                meta device on tensors of another one.
            dtype: dtype of the floating point tables. The default, ``None``, leaves them in float64.
        """
        copy = self._copies.get((device, dtype))
        return as_fake(self._copied(device, dtype) if copy is None else copy)

    def _copied(self, device: torch.device, dtype: torch.dtype | None) -> Any:
        """Make a copy. It is kept, except while torch.compile traces, which makes it part of its program."""
        if torch.compiler.is_compiling():
            return _moved(self._exact, device, dtype)
        with ordinary_tensors():
            copy = self._copies[device, dtype] = _moved(self._exact, device, dtype)
        return copy

    def _copy_to_module(self) -> None:
        device, dtype = self._kind
        if device.type != "meta":
            for kind in {None, dtype, torch.promote_types(dtype, torch.float32)}:
                self._copied(device, kind)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tables:
        """Make copies where the module moves to, before a compiler or a CUDA graph would have to."""
        with ordinary_tensors():
            moved = fn(torch.empty(0, device=self._kind[0], dtype=self._kind[1]))
        self._kind = moved.device, moved.dtype
        self._copy_to_module()
        return self

    def __reduce__(self) -> Any:
        return Tables, (self._build,)


def _moved(x: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(x, Tensor):
        return x.to(device, dtype if x.is_floating_point() else None)
    moved = [_moved(each, device, dtype) for each in x]
    return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
