"""Published image files are read as they were written, and what is damaged, missing or hostile is refused by name."""

import gzip
import os
import pickle

import numpy as np
import pytest
import torch
from data.image_files import floats, load

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


def write_mnist(folder, train=9, test=4, packed=("t10k",)):
    """MNIST's four files, those of ``packed`` parts by gzip."""
    data = {}
    for seed, (part, count) in enumerate((("train", train), ("t10k", test))):
        images, labels = some_bytes(count, 1, 28, 28, seed=seed), np.arange(count, dtype=np.uint8) % 10
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


WRITERS = {"rotated MNIST": write_rotmnist, "MNIST or Fashion-MNIST": write_mnist, "CIFAR-10": write_cifar}
subsets = pytest.mark.filterwarnings("ignore:.*a subset:UserWarning")


@subsets
@pytest.mark.parametrize(
    ("name", "options", "held_out"),
    [
        ("rotated MNIST", {}, 2),
        ("MNIST or Fashion-MNIST", {"packed": ()}, 0),
        ("MNIST or Fashion-MNIST", {"packed": ("train", "t10k")}, 0),
        ("CIFAR-10", {}, 2),
        ("CIFAR-10", {"protocol": 4}, 2),
    ],
)
def test_files_are_read_as_they_were_written(tmp_path, name, options, held_out):
    """The papers' validation part is the last of the training images."""
    (images, labels), test = WRITERS[name](tmp_path, **options)
    kept = len(images) - held_out
    data = load(tmp_path)
    wanted = (images[:kept], labels[:kept]), (images[kept:], labels[kept:]), test
    assert (data.validation is None) == (not held_out)
    for part, (images, labels) in zip(data, wanted, strict=True):
        if part is not None:
            got, classes = part[:]
            assert torch.equal(got, torch.from_numpy(images))
            assert classes.tolist() == labels.tolist()
    assert floats(got).dtype == torch.float32
    assert float(floats(got).max()) <= 1
    assert all(torch.equal(a, b) for a, b in zip(load(tmp_path, name).train[:], data.train[:], strict=True))


@subsets
@pytest.mark.parametrize("name", WRITERS)
def test_missing_files(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"must be a folder with the files of a data set.*{name}: .*and so on"):
        load(tmp_path)
    WRITERS[name](tmp_path)
    for path in sorted(tmp_path.iterdir()):
        moved = path.rename(tmp_path.parent / path.name)
        with pytest.raises(FileNotFoundError, match=rf"{path.name.removesuffix('.gz')} is missing\. {name}: .*\."):
            load(tmp_path, name)
        moved.rename(path)


def cut(path, by=100):
    path.write_bytes(path.read_bytes()[:-by])


def replaced(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def batch(**entries):
    made = {"data": some_bytes(2, 3072), "labels": [3, 5], **entries}
    return lambda path: path.write_bytes(pickle.dumps({key.encode(): value for key, value in made.items()}))


class Calls:
    def __init__(self, function, *arguments):
        self.value = function, arguments

    def __reduce__(self):
        return self.value


DAMAGE = {
    "cut images": ("train-images-idx3-ubyte", cut, "a damaged file: cannot reshape"),
    "cut labels": ("train-labels-idx1-ubyte", lambda path: cut(path, 1), "9, 1, 28, 28.* and 8 labels"),
    "cut gzip": ("t10k-images-idx3-ubyte.gz", cut, "a damaged file: Compressed file ended"),
    "larger": ("train-images-idx3-ubyte", lambda path: write_idx(path, some_bytes(9, 29, 28)), "9, 1, 29, 28"),
    "label": ("train-labels-idx1-ubyte", lambda path: write_idx(path, np.full(9, 10, np.uint8)), "from 10 to 10"),
    "none": ("train-images-idx3-ubyte", lambda path: write_idx(path, some_bytes(0, 28, 28)), "and 9 labels"),
    "word": (AMAT["test"], replaced(b"0.", b"grey "), "could not convert string 'grey' .*at row 0"),
    "infinite": (AMAT["test"], lambda p: p.write_bytes(b"inf " + p.read_bytes().split(b" ", 1)[1]), "finite"),
    "fraction for a label": (AMAT["test"], replaced(b" 3.0", b" 3.5"), "a label from 0 to 9 each"),
    "no lines": (AMAT["test"], lambda path: path.write_text(""), "got others or none"),
    "cut pickle": ("data_batch_2", cut, "a damaged file: .*truncated"),
    "another dictionary": ("data_batch_2", lambda path: path.write_bytes(pickle.dumps({})), "a damaged file: b'data'"),
    "system": ("data_batch_2", batch(data=Calls(os.system, "touch written")), "system is refused"),
    "objects": ("data_batch_2", batch(data=np.array([Calls(os.system, "touch written")], object)), "is refused"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_hostile_files(tmp_path, monkeypatch, damage):
    """Are named, and nothing that a pickle names is called."""
    monkeypatch.chdir(tmp_path)
    file, do, said = DAMAGE[damage]
    for write in WRITERS.values():
        write(tmp_path)
    do(tmp_path / file)
    name = {"m": "rotated MNIST", "d": "CIFAR-10", "t": "MNIST or Fashion-MNIST"}[file[0]]
    with pytest.raises(ValueError, match=f"{file.removesuffix('.gz')}.*{said}"):
        load(tmp_path, name)
    assert not (tmp_path / "written").exists()
