"""Idx files of bytes, the format of MNIST and Fashion-MNIST, plain or packed by gzip."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .parts import find

BLOCK = 1 << 24


def locate(path: Path) -> Path:
    """``path``, or ``path``.gz if only that is there."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.is_file() and not path.is_file() else find(path)


def read(path: Path, item: tuple[int, ...]) -> np.ndarray:
    """Bytes (N, *item)."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            return _array(path, file, item)
    try:
        with gzip.open(path, "rb") as file:
            return _array(path, file, item)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file, got a truncated or damaged one: {error}") from error


def _array(path: Path, file: BinaryIO, item: tuple[int, ...]) -> np.ndarray:
    axes = 1 + len(item)
    magic = bytes([0, 0, 8, axes])  # 8 stands for unsigned bytes
    header = file.read(4 + 4 * axes)
    if header[:4] != magic or len(header) < 4 + 4 * axes:
        raise ValueError(
            f"{path} must be an idx file of bytes with {axes} axes, which begins {magic.hex(' ')} and {axes} lengths, "
            f"got one that begins {header.hex(' ') or 'with nothing'}"
        )
    shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
    if shape[1:] != item:
        raise ValueError(f"{path} must hold images of {_times(item)} pixels, got {_times(shape[1:])}")
    data = _at_most(file, math.prod(shape) + 1)
    if len(data) != math.prod(shape):
        got = f"only {len(data):,}: it is truncated" if len(data) < math.prod(shape) else "more"
        raise ValueError(f"{path} must hold {_times(shape)} bytes, as its header says, got {got}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _at_most(file: BinaryIO, size: int) -> bytearray:
    """What is left of a file, up to ``size`` bytes; in blocks, since a damaged header may ask for terabytes."""
    data = bytearray()
    while len(data) < size and (block := file.read(min(BLOCK, size - len(data)))):
        data += block
    return data


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
