"""The ``--device`` flag of every example and benchmark."""

from __future__ import annotations

import argparse
import re

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
        raise ValueError(f"--device {text}: torch sees {count} CUDA devices, counted from 0")
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""

    def device(text: str) -> str:
        try:
            return checked_device(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda, or cuda:1 and so on")


def index_of(device: str) -> int:
    """The number of a CUDA device; torch does not take "cuda" everywhere."""
    return torch.device(device).index or 0


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"
