"""What every loader of images returns, and the checks they share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Index = int | slice | Sequence[int] | np.ndarray | Tensor


class Images:
    """Images (N, C, H, W) kept as they are stored; an index gives float32, bytes divided by 255.

    What is stored is bytes in memory, floats in memory, or a file that is read image by image: nothing grows to four
    bytes a pixel before it is asked for. ``images[3]`` is (C, H, W); ``images[:100]``, ``images[[5, 2]]`` and
    ``images[mask]`` are (n, C, H, W); ``images[:]`` is all of them as one tensor, 4 bytes a pixel.
    """

    def __init__(self, stored: Any) -> None:
        self.stored = stored  # an array, or a reader with a shape that takes one row or an array of rows as index
        self.shape = tuple(stored.shape)
        self._rows = np.arange(len(self))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Images{self.shape}"

    def rows(self, index: Index) -> np.ndarray:
        """The numbers, from 0, of the images an index means."""
        rows = np.array(self._rows[index.cpu().numpy() if isinstance(index, Tensor) else index])
        if rows.ndim > 1:
            raise IndexError(f"an index of images must have at most one axis, got {rows.ndim}")
        return rows

    def __getitem__(self, index: Index) -> Tensor:
        picked = self.stored[self.rows(index)]
        images = torch.from_numpy(picked.astype(np.float32, order="C"))
        return images.div_(255) if picked.dtype == np.uint8 else images


@dataclass(frozen=True, eq=False)
class Part(Dataset):
    """Images (N, C, H, W) and labels (N,), int64. An index gives the pair: ``images, labels = part[:]``.

    As a data set of torch it is best read batch by batch:
    ``DataLoader(part, sampler=BatchSampler(RandomSampler(part), 8, drop_last=True), batch_size=None)``.
    """

    images: Images
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Index) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[torch.as_tensor(self.images.rows(index))]


@dataclass(frozen=True)
class ImageData:
    """A data set in its parts; ``validation`` is None where the papers hold none out."""

    name: str
    train: Part
    validation: Part | None
    test: Part


def find(path: Path) -> Path:
    """``path``, if it is a file.

    Raises:
        FileNotFoundError: if it is not, saying so when it is there but packed.
    """
    if path.is_file():
        return path
    packed = path.with_name(f"{path.name}.gz")
    unpack = f"; {packed} must be unpacked first: gunzip {packed}" if packed.is_file() else ""
    raise FileNotFoundError(f"{path} is missing{unpack}")


def check_count(path: Path, count: int, published: int) -> None:
    """Warn of a file with other than the published number of images: nothing else tells a subset from a torn copy."""
    if not count:
        raise ValueError(f"{path} must hold {published:,} images, got none")
    if count != published:
        text = f"{path} holds {count:,} images, the published file {published:,}: a subset, or not copied to its end"
        warnings.warn(text, stacklevel=2)


def check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    """Refuse a label, counted from 0, that is none of the classes."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        where = int(wrong[0])
        raise ValueError(f"{path} must hold labels 0 to {classes - 1}, got {labels[where]} for image {where}")


def check_pairs(images: Path, count: int, labels: Path, labelled: int) -> None:
    """Refuse files that do not hold one label an image."""
    if count != labelled:
        raise ValueError(f"{labels} must hold a label for each of the {count:,} images of {images}, got {labelled:,}")
