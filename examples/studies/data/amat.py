"""Rotated MNIST's text files: a line of 784 grey values and a label an image."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from .parts import find

COLUMNS = 28 * 28 + 1
LARGEST = float(np.finfo(np.float32).max)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 1, 28, 28), float32, and labels (N,)."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*input contained no data")  # the number of images is checked
            table = np.loadtxt(find(path), np.float32, comments=None, ndmin=2, encoding="latin1")
    except ValueError as error:
        raise ValueError(_fault(path)) from error
    labels = table[:, -1:].reshape(-1)
    if len(table) and (
        table.shape[1] != COLUMNS or not np.isfinite(table).all() or not np.isin(labels, np.arange(10)).all()
    ):
        raise ValueError(_fault(path))
    return table[:, :-1].reshape(-1, 1, 28, 28), labels.astype(np.int64)


def _fault(path: Path) -> str:
    """What is wrong with a file, and in which line: slower than numpy, which does not tell."""
    wanted = f"{path} must hold {COLUMNS} numbers a line (784 grey values and a label)"
    with path.open(encoding="latin1") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if words and len(words) != COLUMNS:
                return f"{wanted}, got {len(words)} in line {number}"
            for word in words:
                value = _number(word)
                if not math.isfinite(value) or abs(value) > LARGEST:
                    return f"{wanted}, all of them finite, got {word[:20]!r} in line {number}"
            if words and _number(words[-1]) not in range(10):
                return f"{wanted}, and the label from 0 to 9, got {words[-1][:20]!r} in line {number}"
    return wanted


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
