"""Regions that mixed precision must not touch."""

from __future__ import annotations

import contextlib

import torch


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off for a device, where it has it: geometry and exponentials stay in their own dtype."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
