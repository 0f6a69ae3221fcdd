"""The ``--device`` flag of every example and benchmark."""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch


def checked_device(text: str) -> str:
    """``text``, where it names the CPU or a CUDA device that is there.

    Raises:
        ValueError: for anything else, saying what is there.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {text!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if is_cuda(text) and index_of(text) >= count:
        there = f"{count} CUDA device{'s' * (count > 1)}, counted from 0" if count else "no CUDA device"
        raise ValueError(f"--device {text}: torch sees {there}")
    return text


class _Device(argparse.Action):
    """Says which device is missing without argparse's own prefix, which a plain ``type`` would get."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        try:
            setattr(namespace, self.dest, checked_device(values))
        except ValueError as error:
            parser.error(str(error))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", action=_Device, default="cpu", help="cpu (default), cuda, or cuda:1 and so on")


def index_of(device: str) -> int:
    """The number of a CUDA device; torch does not take "cuda" everywhere."""
    return torch.device(device).index or 0


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"
