"""Modules that TorchScript cannot take."""

from __future__ import annotations

from typing import NoReturn


class NotScriptable:
    """A mixin for modules that ``torch.jit.script`` refuses with what to use instead, alone and inside others."""

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks of a module and of all in it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not support TorchScript (torch.jit.script): use torch.compile, or "
            "torch.export to run a model without Python"
        )
