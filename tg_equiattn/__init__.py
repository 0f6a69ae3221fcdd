"""Attention and long context with exact symmetry, for escnn, PyG and e3nn.

The core imports torch alone. Integrations live in ``tg_equiattn.integrations.escnn``, ``.pyg`` and ``.e3nn``. Modules
of the core, such as ``tg_equiattn.nn``, are imported at their first use.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
_MODULES = ("encodings", "functional", "grids", "groups", "neighbors", "nn", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
