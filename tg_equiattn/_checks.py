"""Argument checks shared by modules: each error names the argument, what came and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor


def positive(**arguments: int) -> None:
    """Raise ValueError unless every argument is a positive integer."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def probability(**arguments: float) -> None:
    """Raise ValueError unless every argument is in [0, 1)."""
    for name, value in arguments.items():
        if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def scale(value: float | None) -> None:
    """Raise ValueError unless a scale of scores is None or a finite number."""
    if value is not None and (not isinstance(value, (int, float)) or not math.isfinite(value)):
        raise ValueError(f"scale must be a finite number or None, got {value!r}")


def choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError unless value is one of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")


def features(x: Tensor, channels: int, dim: int, elements: int | None, like: Tensor) -> None:
    """Raise ValueError unless x is (B, channels, [elements,] *spatial) in the dtype and on the device of ``like``."""
    axes = (channels,) if elements is None else (channels, elements)
    layout = ", ".join(["B", *map(str, axes), "H, W" if dim == 2 else "D, H, W"])
    if not isinstance(x, Tensor):
        raise ValueError(f"input must be a torch.Tensor of shape ({layout}), got {type(x).__name__}")
    if x.ndim != 1 + len(axes) + dim or tuple(x.shape[1 : 1 + len(axes)]) != axes:
        raise ValueError(f"input must have shape ({layout}), got {tuple(x.shape)}")
    if min(x.shape[1 + len(axes) :]) < 1:
        raise ValueError(f"input must have at least one pixel on every spatial axis, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"input must be a floating point tensor, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"input must be on {like.device} as the parameters are, got {x.device}")
    mixed = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64  # autocast leaves float64 alone
    if x.dtype != like.dtype and not mixed:
        raise ValueError(f"input must be {like.dtype} as the parameters are, got {x.dtype}")
