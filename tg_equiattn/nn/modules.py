"""What modules of all families have in common."""

from __future__ import annotations

import json
import zlib
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every child that has it, and of the children of the others."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


class NotScriptable:
    """A mixin for modules that ``torch.jit.script`` refuses with what to use instead, alone and inside others."""

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks of a module and of all in it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not support TorchScript (torch.jit.script): use torch.compile, or "
            "torch.export to run a model without Python"
        )


class StoresSettings(nn.Module):
    """A module whose checkpoint says which function its weights are for.

    :meth:`settings` has what changes the function and shows in no parameter's shape. The state_dict holds them as small
    whole numbers, so that averages of state_dicts, in integers or in floating point, still hold them.
    """

    def settings(self) -> dict[str, Any]:
        """Names of arguments and their values, as JSON knows them. Of a pair, the first is compared and the second is
        shown."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        text = json.dumps(self.settings(), default=lambda number: number.item())  # of numpy
        return torch.tensor([*text.encode("ascii"), *_checksum(text)], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """ValueError for weights of a module with other settings."""
        numbers = whole_numbers(state)
        text = bytes(n % 256 for n in numbers[:-4]).decode("latin1")
        if _checksum(text) != numbers[-4:]:
            raise ValueError(
                f"state_dict must be of one {type(self).__name__}, or an average of several with equal settings, got "
                "an average of several with different ones"
            )
        stored = json.loads(text)
        for name, value in self.settings().items():
            (mine, shown), (saved, came) = _pair(value), _pair(stored.get(name))
            if mine != saved:
                raise ValueError(
                    f"state_dict must be of a {type(self).__name__} with {name}={shown}, as this one, got {came}; to "
                    "load the weights all the same, leave out the keys that end in _extra_state and pass strict=False"
                )


def _pair(value: Any) -> tuple[Any, str]:
    """What is compared of a setting and what is shown."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, repr(value))


def whole_numbers(state: Tensor) -> list[int]:
    """The whole numbers of an extra state that may have been averaged in floating point."""
    return state.detach().to("cpu", torch.float64).round().to(torch.int64).tolist()


def _checksum(text: str) -> list[int]:
    """Four numbers that tell an average of two texts from a text."""
    return list(zlib.crc32(text.encode()).to_bytes(4, "big"))
