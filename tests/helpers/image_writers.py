"""Small image data sets in the formats of the published ones; each writer returns the arrays it wrote."""

import gzip
import pickle

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
    return data["train_valid"], data["test"]


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
    return data["train"], data["t10k"]


def write_cifar(folder, count=2, protocol=2):
    """The six batches, each of ``count`` images: pickled dictionaries."""
    data = []
    for seed, name in enumerate(CIFAR):
        images, labels = some_bytes(count, 3, 32, 32, seed=seed), np.arange(seed, seed + count) % 10
        batch = {b"data": images.reshape(count, -1), b"labels": labels.tolist(), b"filenames": [b"a.png"] * count}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
        data.append((images, labels))
    *train, test = data
    return tuple(map(np.concatenate, zip(*train, strict=True))), test
