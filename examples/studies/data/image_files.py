"""Published image data sets from the files they are published in; nothing is downloaded.

data = load(Path("~/rotmnist"))
images, labels = data.train[:]      # all of it: float32 (10000, 1, 28, 28) and int64 (10000,)
images, labels = data.test[[5, 2]]  # or the images asked for
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import amat, cifar, idx, patchcamelyon
from .parts import ImageData, Images, Part, check_count, check_labels, check_pairs

AMAT = {part: f"mnist_all_rotation_normalized_float_{part}.amat" for part in ("train_valid", "test")}
IDX = {part: (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")}
CIFAR = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")  # the Python version; the binary one's end in .bin
CAMELYON = {
    part: tuple(f"camelyonpatch_level_2_split_{part}_{letter}.h5" for letter in "xy")
    for part in ("train", "valid", "test")
}
FILES = {
    "rotmnist": tuple(AMAT.values()),
    "mnist": IDX["train"] + IDX["t10k"],
    "cifar10": CIFAR + tuple(f"{name}.bin" for name in CIFAR),
    "patchcamelyon": CAMELYON["train"] + CAMELYON["valid"] + CAMELYON["test"],
}
SOURCES = {
    "rotmnist": "rotated MNIST (Larochelle et al., 2007): mnist_rotation_new.zip",
    "mnist": "MNIST: yann.lecun.com/exdb/mnist; Fashion-MNIST: github.com/zalandoresearch/fashion-mnist",
    "cifar10": "CIFAR-10 (Python or binary version): www.cs.toronto.edu/~kriz/cifar.html",
    "patchcamelyon": "PatchCamelyon: github.com/basveeling/pcam",
}
NAMES = ("rotmnist", "mnist", "fashion-mnist", "cifar10", "patchcamelyon")
HELD_OUT = {"rotmnist": (10_000, 12_000), "cifar10": (40_000, 50_000)}  # images to train on, of how many

Arrays = tuple[Any, np.ndarray]  # images, in memory or in a file, and labels


def load(folder: Path | str, name: str | None = None, hold_out: bool = True) -> ImageData:
    """The data set whose files lie in a folder, split as in the papers.

    ============= ========== ========== ======= =========================================================
    name          train      validation test
    ============= ========== ========== ======= =========================================================
    rotmnist      10,000     2,000      50,000  (1, 28, 28), floats as published; the last 2,000 held out
    mnist         60,000     None       10,000  (1, 28, 28)
    fashion-mnist 60,000     None       10,000  (1, 28, 28)
    cifar10       40,000     10,000     10,000  (3, 32, 32); the fifth batch held out
    patchcamelyon 262,144    32,768     32,768  (3, 96, 96); read from its files image by image
    ============= ========== ========== ======= =========================================================

    Args:
        folder: has the files, named as published; MNIST's may be packed (.gz).
        name: of the data set; by default the files say. Fashion-MNIST's are named like MNIST's, and taken for those.
        hold_out: False leaves rotmnist's and cifar10's training images together: 12,000 and 50,000, and no validation.

    Files with other than the published number of images are taken for a subset, split in the same proportion, and
    warned of.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged or not in its published format, or if ``name`` is not known.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    folder = Path(folder).expanduser().absolute()
    name = name or _which(folder)
    kind = "mnist" if name == "fashion-mnist" else name
    try:
        arrays = READERS[kind](folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. {SOURCES[kind]}") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}. {SOURCES[kind]}") from error
    if hold_out and kind in HELD_OUT:
        arrays["train"], arrays["validation"] = _split(*arrays["train"], *HELD_OUT[kind])
    parts = {part: Part(Images(images), torch.from_numpy(labels)) for part, (images, labels) in arrays.items()}
    return ImageData(name, parts["train"], parts.get("validation"), parts["test"])


def _which(folder: Path) -> str:
    """The data set of which there is a file."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} must be a folder with the files of one data set. {'; '.join(SOURCES.values())}"
        )
    found = [
        kind
        for kind, files in FILES.items()
        if any((folder / f"{file}{ending}").is_file() for file in files for ending in ("", ".gz"))
    ]
    if not found:
        wanted = "; ".join(f"{folder / files[0]} and so on, {SOURCES[kind]}" for kind, files in FILES.items())
        raise FileNotFoundError(f"{folder} must hold the files of one data set, got none. {wanted}")
    if len(found) > 1:
        raise ValueError(f"{folder} must hold the files of one data set, got {' and '.join(found)}")
    return found[0]


def _split(images: np.ndarray, labels: np.ndarray, train: int, of: int) -> tuple[Arrays, Arrays]:
    count = max(1, len(labels) * train // of)
    return (images[:count], labels[:count]), (images[count:], labels[count:])


def _rotmnist(folder: Path) -> dict[str, Arrays]:
    data = {}
    for part, published in (("train_valid", 12_000), ("test", 50_000)):
        path = folder / AMAT[part]
        data[part] = amat.read(path)
        check_count(path, len(data[part][1]), published)
    return {"train": data["train_valid"], "test": data["test"]}


def _mnist(folder: Path) -> dict[str, Arrays]:
    data = {}
    for part, published in (("train", 60_000), ("t10k", 10_000)):
        paths = [idx.locate(folder / file) for file in IDX[part]]
        images, labels = idx.read(paths[0], (28, 28)), idx.read(paths[1], ())
        check_pairs(paths[0], len(images), paths[1], len(labels))
        check_labels(paths[1], labels, 10)
        check_count(paths[0], len(images), published)
        data[part] = images[:, None], labels.astype(np.int64)
    return {"train": data["train"], "test": data["t10k"]}


def _cifar10(folder: Path) -> dict[str, Arrays]:
    binary = any((folder / f"{file}.bin").is_file() for file in CIFAR)
    read: Callable[[Path], Arrays] = cifar.read_binary if binary else cifar.read_python
    batches = []
    for file in CIFAR:
        path = folder / (f"{file}.bin" if binary else file)
        batches.append(read(path))
        check_count(path, len(batches[-1][1]), 10_000)
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches[:-1], strict=True))
    return {"train": (images, labels), "test": batches[-1]}


def _patchcamelyon(folder: Path) -> dict[str, Arrays]:
    data = {}
    for part, published in (("train", 262_144), ("valid", 32_768), ("test", 32_768)):
        paths = [folder / file for file in CAMELYON[part]]
        images, labels = patchcamelyon.read(*paths)
        check_pairs(paths[0], images.shape[0], paths[1], len(labels))
        check_count(paths[0], len(labels), published)
        data[part] = images, labels
    return {"train": data["train"], "validation": data["valid"], "test": data["test"]}


READERS = {"rotmnist": _rotmnist, "mnist": _mnist, "cifar10": _cifar10, "patchcamelyon": _patchcamelyon}
