"""Base classes and helpers that all modules share."""

from __future__ import annotations

import json
import zlib
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every child that has this method, and descend into children that do not have it."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


def with_zero_gradients(module: nn.Module, out: Tensor) -> Tensor:
    """The output of a module for an input without nodes, from which every parameter gets a gradient of zero.

    DistributedDataParallel waits for a gradient of every parameter on every rank.
    """
    empty = [p.flatten()[:0].sum() for p in module.parameters() if not is_lazy(p)]
    return out + sum(empty, out.new_zeros(())).to(out.dtype)


class NotScriptable:
    """A mixin for modules that TorchScript does not support. ``torch.jit.script`` raises an error that names the
    alternatives, also if the module is part of another one."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError. torch.jit.script calls this method of a module and of all its submodules."""
        raise NotImplementedError(
            f"{type(self).__name__} does not support TorchScript (torch.jit.script): use torch.compile, or "
            "torch.export to run a model without Python"
        )


class StoresSettings(nn.Module):
    """A module that stores its settings in checkpoints and compares them on loading.

    :meth:`settings` returns the arguments that change the module's function but no parameter's shape. The state_dict
    holds them as the bytes of a text, which survive averaging of state_dicts with equal settings, in integers or in
    floating point.
    """

    def settings(self) -> dict[str, Any]:
        """The arguments to store, as a dict of JSON values. Of a value ``{"digest": ..., "text": ...}`` the digest is
        compared, and the text is shown in errors."""
        raise NotImplementedError

    def _text(self) -> str:
        return json.dumps(self.settings(), default=lambda number: number.item())  # NumPy numbers

    def get_extra_state(self) -> Tensor:
        text = self._text()
        return torch.tensor([*text.encode("ascii"), *_checksum(text)], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the stored settings differ from those of this module."""
        numbers = whole_numbers(state)
        text = bytes(n % 256 for n in numbers[:-4]).decode("latin1")
        if _checksum(text) != numbers[-4:]:
            raise ValueError(
                f"state_dict must come from one {type(self).__name__}, or be an average of several with equal "
                "settings, got an average of several with different settings"
            )
        own, stored = json.loads(self._text()), json.loads(text)
        for name in own | stored:
            (mine, shown), (saved, came) = _compared(own.get(name)), _compared(stored.get(name))
            if mine != saved:
                raise ValueError(
                    f"state_dict must come from a {type(self).__name__} with {name}={shown}, like this one, got "
                    f"{came}; to load the weights anyway, remove the keys that end in _extra_state and pass "
                    "strict=False"
                )


def _compared(value: Any) -> tuple[Any, str]:
    """The value of a setting to compare, and the text to show."""
    return (value["digest"], value["text"]) if isinstance(value, dict) else (value, repr(value))


def whole_numbers(state: Tensor) -> list[int]:
    """Round an extra state, which may have been averaged in floating point, to integers."""
    return state.detach().to("cpu", torch.float64).round().to(torch.int64).tolist()


def _checksum(text: str) -> list[int]:
    """The CRC-32 of a text as four bytes, by which an average of two different texts is recognised."""
    return list(zlib.crc32(text.encode()).to_bytes(4, "big"))
