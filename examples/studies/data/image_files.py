"""MNIST, Fashion-MNIST, CIFAR-10 and rotated MNIST from the files they are published in; nothing is downloaded."""

from __future__ import annotations

import gzip
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

Arrays = tuple[np.ndarray, np.ndarray]  # images and labels
GLOBALS = {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
GLOBALS |= {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}


class ImageData(NamedTuple):
    """Images (N, C, H, W), bytes or float32 as in the files, and labels (N,), in parts."""

    train: TensorDataset
    validation: TensorDataset | None  # None where the papers hold none out
    test: TensorDataset


class Published(NamedTuple):
    """A data set's files."""

    source: str
    read: Callable[..., Arrays]
    files: tuple[tuple[str, ...], tuple[str, ...]]  # to train and to test
    counts: tuple[int, int]  # images in them
    held_out: int  # of those to train on, the last: the papers' validation part
    shape: tuple[int, int, int]


def floats(images: Tensor) -> Tensor:
    """Bytes divided by 255; floats as they are."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def _amat(path: Path) -> Arrays:
    """A line of 784 grey values and a label an image."""
    with path.open(encoding="latin1") as file:
        table = np.loadtxt(file, np.float32, comments=None, ndmin=2)
    return table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1]


def _idx(images: Path, labels: Path) -> Arrays:
    """Headers of 16 and 8 bytes, which end with the lengths of axes; then bytes. Either file may be packed by gzip."""
    raw = []
    for path in (images, labels):
        packed = path.with_name(f"{path.name}.gz")
        with gzip.open(packed) if packed.is_file() and not path.is_file() else path.open("rb") as file:
            raw.append(file.read())
    shape = np.frombuffer(raw[0], ">i4", 3, offset=4)
    return np.frombuffer(raw[0], np.uint8, offset=16).reshape(shape)[:, None], np.frombuffer(raw[1], np.uint8, offset=8)


class _Unpickler(pickle.Unpickler):
    """Arrays, numbers and texts alone: a pickle can name any function and have it called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} is refused")
        return super().find_class(module, name)


def _cifar(*paths: Path) -> Arrays:
    """Batches of the Python version: pickled dictionaries."""
    batches = []
    for path in paths:
        with path.open("rb") as file:
            batches.append(_Unpickler(file, encoding="bytes").load())
    images, labels = (np.concatenate([batch[key] for batch in batches]) for key in (b"data", b"labels"))
    return images.reshape(-1, 3, 32, 32), labels


SETS = {
    "rotated MNIST": Published(
        "mnist_rotation_new.zip of Larochelle et al. (2007)", _amat,
        tuple((f"mnist_all_rotation_normalized_float_{part}.amat",) for part in ("train_valid", "test")),
        (12_000, 50_000), 2_000, (1, 28, 28),
    ),
    "MNIST or Fashion-MNIST": Published(
        "ossci-datasets.s3.amazonaws.com/mnist, github.com/zalandoresearch/fashion-mnist", _idx,
        tuple((f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")),
        (60_000, 10_000), 0, (1, 28, 28),
    ),
    "CIFAR-10": Published(
        "cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html", _cifar,
        (tuple(f"data_batch_{n}" for n in range(1, 6)), ("test_batch",)),
        (50_000, 10_000), 10_000, (3, 32, 32),
    ),
}  # fmt: skip


def load(folder: Path | str, *names: str) -> ImageData:
    """The data set, one of those named or any, whose files lie in a folder, split as in the papers.

    Files with other than the published number of images are taken for a subset and warned of.

    Raises:
        FileNotFoundError: if a file is missing; says which, and where it comes from.
        ValueError: if a file is damaged.
    """
    folder, wanted = Path(folder).expanduser().absolute(), {name: SETS[name] for name in names or SETS}
    for name, published in wanted.items():
        if any(next(folder.glob(f"{file}*"), None) for files in published.files for file in files):
            return _load(folder, name, published)
    files = "; ".join(
        f"{name}: {published.files[0][0]} and so on, {published.source}" for name, published in wanted.items()
    )
    raise FileNotFoundError(f"{folder} must be a folder with the files of a data set, got none of them. {files}")


def load_mnist_test(folder: Path | str) -> tuple[Tensor, Tensor]:
    """MNIST's 10,000 test images, bytes (N, 1, 28, 28), and their labels, from a folder that may hold these alone.

    Raises:
        FileNotFoundError: if a file is missing; says which, and where it comes from.
        ValueError: if a file is damaged.
    """
    folder, name = Path(folder).expanduser().absolute(), "MNIST or Fashion-MNIST"
    return _part(name, SETS[name], [folder / file for file in SETS[name].files[1]], SETS[name].counts[1])


def _load(folder: Path, name: str, published: Published) -> ImageData:
    (images, labels), test = (
        _part(name, published, [folder / file for file in files], count)
        for files, count in zip(published.files, published.counts, strict=True)
    )
    kept = len(images) - len(images) * published.held_out // published.counts[0]
    held_out = TensorDataset(images[kept:], labels[kept:]) if published.held_out else None
    return ImageData(TensorDataset(images[:kept], labels[:kept]), held_out, TensorDataset(*test))


def _part(name: str, published: Published, paths: list[Path], count: int) -> tuple[Tensor, Tensor]:
    """Images and labels of some files."""
    try:
        images, labels = published.read(*paths)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error.filename} is missing. {name}: {published.source}") from error
    except Exception as error:  # what damage makes a reader raise is not bounded
        raise ValueError(f"{_listed(paths)} must be {name}, got a damaged file: {error}. {published.source}") from error
    if images.shape[1:] != published.shape or len(images) != len(labels) or not np.isin(labels, range(10)).all():
        raise ValueError(
            f"{_listed(paths)} must hold images {published.shape} of {name} with a label from 0 to 9 each, got "
            f"{images.shape} and {len(labels)} labels from {min(labels, default=0)} to {max(labels, default=0)}"
        )
    if not (np.isfinite(images).all() and len(images)):
        raise ValueError(f"{_listed(paths)} must hold {count:,} images of finite numbers, got others or none")
    if len(images) != count:
        warnings.warn(f"{_listed(paths)}: {len(images):,} images, published are {count:,}: a subset?", stacklevel=4)
    return torch.tensor(images), torch.tensor(labels.astype(np.int64))


def _listed(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))
