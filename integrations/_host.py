"""The check that every integration makes before it imports its host library."""

from __future__ import annotations

import importlib


def require(module: str, extra: str) -> None:
    """Import ``module``, or raise an ImportError with the pip line that installs it."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"tg_equiattn.integrations.{extra} needs {module}, which failed to import ({error}); "
            f"install it, in a clone of tg_equiattn, with: pip install '.[{extra}]'"
        ) from error
