"""Batches of CIFAR-10, in its binary version and in its Python version, which is pickled.

A pickle can name any function and have it called. Here nothing that a file names is looked up: the few globals of the
published files get stand-ins that build arrays of bytes and no more, and any other global is refused.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .parts import check_labels, find

PIXELS = 3 * 32 * 32  # channel by channel, each row by row


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32), bytes, and labels (N,): an image is a byte of its label and its pixels."""
    raw = np.fromfile(find(path), np.uint8)
    if len(raw) % (1 + PIXELS):
        raise ValueError(f"{path} must hold {1 + PIXELS} bytes an image, got {len(raw):,} bytes: not whole images")
    table = raw.reshape(-1, 1 + PIXELS)
    check_labels(path, table[:, 0], 10)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].astype(np.int64)


def read_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32), bytes, and labels (N,) of a pickled dictionary with ``b"data"`` and ``b"labels"``."""
    wanted = f"{path} must be a pickled batch of CIFAR-10"
    with find(path).open("rb") as file:
        try:
            batch = _Unpickler(file, encoding="bytes").load()
        except _RefusedError as error:
            raise ValueError(f"{wanted}, which holds numbers, texts and an array of bytes; refused: {error}") from None
        except Exception as error:  # what damage makes the unpickler raise is not bounded
            said = f"{type(error).__name__}: {error}"[:200]
            raise ValueError(f"{wanted}, got a truncated file or something else: {said}") from error
    if type(batch) is not dict or b"data" not in batch or b"labels" not in batch:
        raise ValueError(f"{wanted}, a dictionary with b'data' and b'labels', got another {type(batch).__name__}")
    data, labels = getattr(batch[b"data"], "array", None), batch[b"labels"]
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
        got = "something else" if data is None else f"shape {data.shape}"
        raise ValueError(f"{wanted} with an array of {PIXELS} bytes an image in b'data', got {got}")
    if type(labels) is not list or len(labels) != len(data):
        got = len(labels) if type(labels) is list else type(labels).__name__
        raise ValueError(f"{wanted} with a list of {len(data):,} labels in b'labels', got {got}")
    for where, label in enumerate(labels):
        if type(label) is not int or label not in range(10):
            raise ValueError(f"{wanted} with labels 0 to 9 in b'labels', got something else for image {where}")
    return data.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


class _RefusedError(ValueError):
    """What a batch of CIFAR-10 does not hold."""


class _Bytes:
    """Stands for numpy's dtype of bytes. Its state is the byte order, which bytes have not."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for an array of bytes, which its state describes."""

    array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if type(dtype) is not _Bytes or type(raw) is not bytes:
            raise _RefusedError("an array of something else than bytes")
        if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 2 or math.prod(shape) != len(raw):
            raise _RefusedError(f"an array of {len(raw):,} bytes whose shape does not fit them")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Numbers, texts, lists, dictionaries and arrays of bytes.

    What ``find_class`` gives is called with, and has its state set to, whatever the file says; so it gives methods,
    whose attributes cannot be set, and they check all they take.
    """

    def find_class(self, module: str, name: str) -> Callable | None:
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return self._new_array
            case "numpy", "dtype":
                return self._new_dtype
            case "numpy", "ndarray":
                return None  # only ever handed to _reconstruct
            case "_codecs", "encode":
                return self._encode
        raise _RefusedError(f"the global {module[:100]}.{name[:100]}")

    def _new_array(self, kind: Any, shape: Any, code: Any) -> _Array:
        return _Array()

    def _new_dtype(self, name: Any, align: Any = 0, copy: Any = 1) -> _Bytes:
        if type(name) not in (str, bytes) or name not in ("u1", b"u1"):
            raise _RefusedError("an array of something else than bytes")
        return _Bytes()

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Python 3's way to write bytes in a pickle for Python 2."""
        if type(text) is not str or type(encoding) not in (str, bytes) or encoding not in ("latin1", b"latin1"):
            raise _RefusedError("bytes in another encoding than latin1")
        return text.encode("latin1")
