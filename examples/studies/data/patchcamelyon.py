"""PatchCamelyon's HDF5 files, which are read image by image: 7 GB of bytes to train on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

from .parts import check_labels, find


class Pixels:
    """Images (N, 3, 96, 96), bytes, that stay in their file.

    The file is opened for each index, so workers may have copies of this; take many images with one index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as file:
            self.shape = (_dataset(path, file, "x", (96, 96, 3)).shape[0], 3, 96, 96)

    def __getitem__(self, rows: np.integer | np.ndarray) -> np.ndarray:
        rows = np.asarray(rows)
        with _opened(self.path) as file:
            images = self._read(file["x"], rows.reshape(-1))
        return np.moveaxis(images, -1, 1).reshape(*rows.shape, *self.shape[1:])

    def _read(self, dataset: h5py.Dataset, rows: np.ndarray) -> np.ndarray:
        if len(rows) and (np.diff(rows) == 1).all():
            return dataset[rows[0] : rows[-1] + 1]
        images = np.empty((len(rows), 96, 96, 3), np.uint8)
        for image, row in zip(images, rows, strict=True):  # h5py selects rows only in rising order, each once
            image[:] = dataset[row]
        return images


def read(images: Path, labels: Path) -> tuple[Pixels, np.ndarray]:
    """Images, in their file, and labels (N,)."""
    pixels = Pixels(images)
    with _opened(labels) as file:
        values = _dataset(labels, file, "y", (1, 1, 1))[:].reshape(-1)
    check_labels(labels, values, 2)
    return pixels, values.astype(np.int64)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """The file; what HDF5 makes of damage to it, there or on reading, becomes a ValueError."""
    find(path)
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} must be a whole HDF5 file, got a truncated or damaged one: {error}") from error


def _dataset(path: Path, file: h5py.File, name: str, item: tuple[int, ...]) -> h5py.Dataset:
    wanted = f'{path} must hold a dataset "{name}" of bytes and shape (N, {", ".join(map(str, item))})'
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{wanted}, got {type(dataset).__name__ if dataset else f'only {sorted(file)[:9]}'}")
    if dataset.dtype != np.uint8 or dataset.shape is None or dataset.shape[1:] != item:
        raise ValueError(f"{wanted}, got {dataset.dtype} and shape {dataset.shape}")
    return dataset
