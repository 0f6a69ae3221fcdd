"""Readers of published image files: MNIST and Fashion-MNIST (idx), and CIFAR-10 (binary version)."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IDX = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
       "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}  # fmt: skip
CIFAR = {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test": ("test_batch.bin",)}
SOURCES = (
    "MNIST: yann.lecun.com/exdb/mnist; Fashion-MNIST: github.com/zalandoresearch/fashion-mnist; CIFAR-10 (binary "
    "version): www.cs.toronto.edu/~kriz/cifar.html"
)


def load(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Images (N, C, H, W) in [0, 1] and labels of ``"train"`` and ``"test"``; the files say which data set it is."""
    if _find(folder, IDX["train"][0]):
        parts = {part: (_idx(folder, images), _idx(folder, labels)) for part, (images, labels) in IDX.items()}
        data = {part: (images[:, None], labels) for part, (images, labels) in parts.items()}
    elif _find(folder, CIFAR["train"][0]):
        data = {part: _cifar(folder, names) for part, names in CIFAR.items()}
    else:
        raise SystemExit(
            f"{folder / IDX['train'][0]} (or .gz) and {folder / CIFAR['train'][0]} are missing: --data must name a "
            f"folder with the files of one data set. {SOURCES}"
        )
    for part, (images, labels) in data.items():
        if len(images) != len(labels):
            raise SystemExit(f"{folder} must hold one label an image, got {len(images)} and {len(labels)} to {part}")
    return {
        part: (torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long())
        for part, (images, labels) in data.items()
    }


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _bytes(folder: Path, name: str) -> bytes:
    path = _find(folder, name)
    if path is None:
        raise SystemExit(f"{folder / name} is missing. {SOURCES}")
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _idx(folder: Path, name: str) -> np.ndarray:
    raw = _bytes(folder, name)
    axes = raw[3] if len(raw) > 3 else 0
    shape = np.frombuffer(raw, ">u4", axes, 4).astype(int) if len(raw) >= 4 + 4 * axes else np.array([-1])
    if raw[:3] != b"\x00\x00\x08" or len(raw) != 4 + 4 * axes + shape.prod():
        raise SystemExit(f"{folder / name} must be an idx file of bytes, got {len(raw)} bytes beginning {raw[:4]!r}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def _cifar(folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    tables = []
    for name in names:
        raw = np.frombuffer(_bytes(folder, name), np.uint8)
        if not len(raw) or len(raw) % 3073:
            raise SystemExit(f"{folder / name} must hold 3073 bytes an image, got {len(raw)} bytes")
        tables.append(raw.reshape(-1, 3073))
    table = np.concatenate(tables)
    return table[:, 1:].reshape(-1, 3, 32, 32).copy(), table[:, 0].copy()
