"""Attention and long context with exact symmetry, for escnn, PyG and e3nn.

The core imports torch alone. Integrations live in ``tg_equiattn.integrations.escnn``, ``.pyg`` and ``.e3nn``. Modules
of the core, such as ``tg_equiattn.nn``, are imported at their first use.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
_MODULES = ("functional", "graphs", "grids", "groups", "nn", "testing")
_OLD = {  # old names of public modules
    "neighbors": "tg_equiattn.graphs",
    "encodings": "a private module: tg_equiattn.nn.GroupAttention has an argument relation",
}


class _OldNames:
    """Imports of modules that have other names now raise an error that names these."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        place, _, old = name.rpartition(".")
        if place == __name__ and old in _OLD:
            raise ImportError(f"{name} is now {_OLD[old]}", name=name)


sys.meta_path.append(_OldNames)  # type: ignore[arg-type]  # it is asked where no other finder has found a module


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
