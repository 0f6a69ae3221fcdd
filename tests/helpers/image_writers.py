"""Small image data sets in the formats of the published ones; each writer returns the arrays it wrote.

Images are (N, C, H, W) and random, so that no two axes can be taken for one another; labels are 0, 1, 2 and so on.
"""

import gzip
import io
import pickle
import struct
from typing import ClassVar

import h5py
import numpy as np

AMAT = {part: f"mnist_all_rotation_normalized_float_{part}.amat" for part in ("train_valid", "test")}
CIFAR = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")


def some_bytes(*shape, seed=0):
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def write_rotmnist(folder, train=12, test=5):
    """Lines of 784 grey values, row by row, and the label."""
    data = {}
    for seed, (part, count) in enumerate((("train_valid", train), ("test", test))):
        images, labels = some_bytes(count, 1, 28, 28, seed=seed).astype(np.float32) / 256, np.arange(count) % 10
        np.savetxt(folder / AMAT[part], np.column_stack([images.reshape(count, -1), labels]), fmt="%.8f")
        data[part] = images, labels
    return data


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header + array.tobytes())


def write_mnist(folder, train=9, test=4, packed=("t10k",), margin=0):
    """MNIST's four files, those of ``packed`` parts by gzip, with black columns at either side."""
    data = {}
    for seed, (part, count) in enumerate((("train", train), ("t10k", test))):
        images, labels = some_bytes(count, 1, 28, 28, seed=seed), np.arange(count, dtype=np.uint8) % 10
        images[..., :margin], images[..., 28 - margin :] = 0, 0
        suffix = ".gz" if part in packed else ""
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images[:, 0])
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)
        data[part] = images, labels
    return data


class Python2Pickler(pickle._Pickler):
    """Writes texts and bytes alike as Python 2's strings, and numpy's globals under the names they had then."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # only the pickler written in Python has one

    def save_string(self, value):
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string

    def save_global(self, value, name=None):
        module = "numpy.core.multiarray" if value.__name__ == "_reconstruct" else value.__module__
        self.write(pickle.GLOBAL + f"{module}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch[type] = dispatch[type(len)] = save_global


def python2_pickle(value):
    file = io.BytesIO()
    Python2Pickler(file, 2).dump(value)
    return file.getvalue()


def cifar_batch(images, labels):
    """The dictionary that CIFAR-10's Python version pickles."""
    count = len(labels)
    return {
        b"data": images.reshape(count, -1),
        b"labels": [int(label) for label in labels],
        b"batch_label": b"batch of some",
        b"filenames": [b"%d.png" % n for n in range(count)],
    }


def write_cifar(folder, count=2, version="binary", dump=python2_pickle):
    """The six batches, each of ``count`` images, in the ``"binary"`` or the ``"python"`` version."""
    data = {}
    for seed, name in enumerate(CIFAR):
        images, labels = some_bytes(count, 3, 32, 32, seed=seed), np.arange(seed, seed + count) % 10
        if version == "binary":
            table = np.column_stack([labels.astype(np.uint8), images.reshape(count, -1)])
            (folder / f"{name}.bin").write_bytes(table.tobytes())
        else:
            (folder / name).write_bytes(dump(cifar_batch(images, labels)))
        data[name] = images, labels
    return data


def write_h5(path, **datasets):
    with h5py.File(path, "w") as file:
        for name, array in datasets.items():
            file[name] = array


def write_patchcamelyon(folder, train=7, valid=3, test=2):
    """Images with their channels last, and labels with three axes of length 1."""
    data = {}
    for seed, (part, count) in enumerate((("train", train), ("valid", valid), ("test", test))):
        images, labels = some_bytes(count, 3, 96, 96, seed=seed), np.arange(count, dtype=np.uint8) % 2
        stem = f"camelyonpatch_level_2_split_{part}"
        write_h5(folder / f"{stem}_x.h5", x=np.moveaxis(images, 1, -1))
        write_h5(folder / f"{stem}_y.h5", y=labels.reshape(-1, 1, 1, 1))
        data[part] = images, labels
    return data
