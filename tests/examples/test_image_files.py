"""Published image files are read as they were written, and what is damaged, missing or hostile is refused by name."""

import gzip
import pickle
import re

import h5py
import numpy as np
import pytest
import torch
from image_writers import (
    AMAT,
    CIFAR,
    cifar_batch,
    python2_pickle,
    some_bytes,
    write_cifar,
    write_h5,
    write_idx,
    write_mnist,
    write_patchcamelyon,
    write_rotmnist,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

WRITERS = {
    "rotmnist": write_rotmnist,
    "mnist": write_mnist,
    "cifar10": write_cifar,
    "patchcamelyon": write_patchcamelyon,
}


@pytest.fixture(scope="module")
def files():
    from data import image_files

    return image_files


@pytest.fixture
def load(files):
    """Loading what is meant to be a subset."""

    def loading(*arguments, **options):
        with pytest.warns(UserWarning, match="the published file"):
            return files.load(*arguments, **options)

    return loading


@pytest.fixture
def refused(files):
    """The message with which a folder is refused."""

    def refusing(folder, error=ValueError, **options):
        with pytest.raises(error) as caught:
            files.load(folder, **options)
        assert type(caught.value) is error
        return str(caught.value)

    return refusing


subsets = pytest.mark.filterwarnings("ignore:.*the published file:UserWarning")


def assert_holds(part, images, labels):
    wanted = torch.from_numpy(images).float() / (255 if images.dtype == np.uint8 else 1)
    got, classes = part[:]
    assert part.images.shape == images.shape
    assert len(part) == len(part.images) == len(images)
    assert got.dtype == torch.float32
    assert classes.dtype == torch.int64
    assert torch.equal(got, wanted)
    assert classes.tolist() == labels.tolist()


def test_rotmnist(load, tmp_path):
    written = write_rotmnist(tmp_path)
    images, labels = written["train_valid"]
    data = load(tmp_path)
    assert data.name == "rotmnist"
    assert_holds(data.train, images[:10], labels[:10])
    assert_holds(data.validation, images[10:], labels[10:])
    assert_holds(data.test, *written["test"])
    whole = load(tmp_path, hold_out=False)
    assert whole.validation is None
    assert_holds(whole.train, images, labels)


@pytest.mark.parametrize("packed", [(), ("train", "t10k")])
@pytest.mark.parametrize("name", [None, "fashion-mnist"])
def test_mnist(load, tmp_path, packed, name):
    written = write_mnist(tmp_path, packed=packed)
    data = load(tmp_path, name)
    assert data.name == (name or "mnist")
    assert data.validation is None
    assert_holds(data.train, *written["train"])
    assert_holds(data.test, *written["t10k"])


def python3(protocol):
    return lambda batch: pickle.dumps(batch, protocol)


@pytest.mark.parametrize(
    ("version", "dump"),
    [
        ("binary", None),
        ("python", python2_pickle),
        ("python", lambda batch: python2_pickle(batch).replace(b"numpy.core", b"numpy._core")),
        ("python", python3(2)),
        ("python", python3(4)),
    ],
    ids=["binary", "python 2", "numpy 2", "python 3, protocol 2", "python 3, protocol 4"],
)
def test_cifar10(load, tmp_path, version, dump):
    written = write_cifar(tmp_path, 2, version, dump)
    images, labels = (np.concatenate(arrays) for arrays in zip(*(written[name] for name in CIFAR[:5]), strict=True))
    data = load(tmp_path)
    assert data.name == "cifar10"
    assert_holds(data.train, images[:8], labels[:8])
    assert_holds(data.validation, *written["data_batch_5"])
    assert_holds(data.test, *written["test_batch"])
    assert_holds(load(tmp_path, hold_out=False).train, images, labels)


def test_patchcamelyon(load, tmp_path):
    written = write_patchcamelyon(tmp_path)
    data = load(tmp_path)
    assert data.name == "patchcamelyon"
    assert_holds(data.train, *written["train"])
    assert_holds(data.validation, *written["valid"])
    assert_holds(data.test, *written["test"])


def test_layouts(load, tmp_path):
    """One pixel, at the byte the formats' own descriptions give it."""
    for folder in ("mnist", "rotmnist", "cifar10", "patchcamelyon"):
        (tmp_path / folder).mkdir()
        WRITERS[folder](tmp_path / folder)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    raw = bytearray(path.read_bytes())
    raw[16:] = bytes(len(raw) - 16)
    raw[16 + 2 * 784 + 5 * 28 + 7] = 255
    path.write_bytes(raw)
    assert load(tmp_path / "mnist").train.images[:].nonzero().tolist() == [[2, 0, 5, 7]]

    path = tmp_path / "rotmnist" / AMAT["test"]
    path.write_text(f"{'0 ' * (5 * 28 + 7)}1 {'0 ' * (784 - 5 * 28 - 8)}9\n")
    images, labels = load(tmp_path / "rotmnist").test[:]
    assert images.nonzero().tolist() == [[0, 0, 5, 7]]
    assert labels.tolist() == [9]

    path = tmp_path / "cifar10" / "test_batch.bin"
    raw = bytearray(2 * 3073)
    raw[3073], raw[3073 + 1 + 2 * 1024 + 5 * 32 + 7] = 4, 255
    path.write_bytes(raw)
    images, labels = load(tmp_path / "cifar10").test[:]
    assert images.nonzero().tolist() == [[1, 2, 5, 7]]
    assert labels.tolist() == [0, 4]

    with h5py.File(tmp_path / "patchcamelyon" / "camelyonpatch_level_2_split_test_x.h5", "a") as file:
        file["x"][:] = 0
        file["x"][1, 5, 7, 2] = 255
    assert load(tmp_path / "patchcamelyon").test.images[:].nonzero().tolist() == [[1, 2, 5, 7]]


@subsets
@pytest.mark.parametrize("name", WRITERS)
def test_indices(files, tmp_path, name):
    WRITERS[name](tmp_path)
    part = files.load(tmp_path, name, hold_out=False).train
    images, labels = part[:]
    for index in (2, -1, np.int64(1), torch.tensor(3), slice(1, 4), slice(None, None, -2), [4, 0, 4], [], np.array([2]),
                  torch.tensor([3, 1]), labels == 1):  # fmt: skip
        rows = torch.arange(len(part))[index] if not isinstance(index, slice) else torch.tensor(range(len(part))[index])
        got, classes = part[index]
        assert torch.equal(got, images[rows])
        assert torch.equal(classes, labels[rows])
        assert got.is_contiguous()
    for index in (len(part), [0, len(part)], [[0]]):
        with pytest.raises(IndexError):
            part.images[index]
    part.images[0].zero_()
    assert torch.equal(part.images[0], images[0])  # what is given is a copy


@subsets
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches(files, tmp_path, workers):
    write_patchcamelyon(tmp_path)
    part = files.load(tmp_path).train
    sampler = BatchSampler(SequentialSampler(part), 3, drop_last=False)
    batches = list(DataLoader(part, sampler=sampler, batch_size=None, num_workers=workers))
    assert [len(labels) for _, labels in batches] == [3, 3, 1]
    assert torch.equal(torch.cat([images for images, _ in batches]), part.images[:])
    assert torch.equal(pickle.loads(pickle.dumps(part)).images[:], part.images[:])


@subsets
@pytest.mark.parametrize(("name", "kept"), [("mnist", np.ndarray), ("cifar10", np.ndarray), ("patchcamelyon", None)])
def test_bytes_stay_bytes(files, tmp_path, name, kept):
    WRITERS[name](tmp_path)
    stored = files.load(tmp_path).train.images.stored
    if kept is None:
        assert not any(isinstance(value, np.ndarray) for value in vars(stored).values())
    else:
        assert stored.dtype == np.uint8


def test_subsets_are_warned_of(files, tmp_path):
    write_mnist(tmp_path)
    with pytest.warns(UserWarning, match="the published file") as warned:
        files.load(tmp_path)
    first, second = (str(warning.message) for warning in warned)
    assert f"{tmp_path / 'train-images-idx3-ubyte'} holds 9 images, the published file 60,000" in first
    assert f"{tmp_path / 't10k-images-idx3-ubyte.gz'} holds 4 images, the published file 10,000" in second


def test_published_numbers_are_not(files, tmp_path):
    write_mnist(tmp_path, 60_000, 10_000, packed=())
    data = files.load(tmp_path)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)


@pytest.mark.parametrize(("rows", "train"), [(1, 1), (2, 1), (20, 16)])
def test_small_subsets_are_split(load, tmp_path, rows, train):
    write_rotmnist(tmp_path, rows)
    data = load(tmp_path)
    assert (len(data.train), len(data.validation)) == (train, rows - train)


@subsets
def test_missing_files(refused, tmp_path):
    for name, write in WRITERS.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        for path in sorted(folder.iterdir()):
            moved = path.rename(tmp_path / path.name)
            message = refused(folder, FileNotFoundError)
            assert f"{folder / path.name.removesuffix('.gz')} is missing" in message
            assert ": " in message.split(" is missing")[1]  # where it comes from
            moved.rename(path)


def test_nothing_there(refused, tmp_path):
    message = refused(tmp_path, FileNotFoundError)
    for name in ("train-images-idx3-ubyte", "data_batch_1", AMAT["test"].replace("test", "train_valid"),
                 "camelyonpatch_level_2_split_train_x.h5", "basveeling/pcam", "mnist_rotation_new.zip"):  # fmt: skip
        assert name in message
    assert f"{tmp_path / 'none'} must be a folder" in refused(tmp_path / "none", FileNotFoundError)
    assert "is missing" in refused(tmp_path / "none", FileNotFoundError, name="cifar10")


def test_names(load, refused, tmp_path):
    write_mnist(tmp_path)
    written = write_rotmnist(tmp_path)
    assert "got rotmnist and mnist" in refused(tmp_path)
    assert_holds(load(str(tmp_path), "rotmnist").test, *written["test"])
    assert "name must be one of rotmnist, mnist" in refused(tmp_path, name="imagenet")


def cut(path, by=1):
    path.write_bytes(path.read_bytes()[:-by])


def flipped(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


IDX_DAMAGE = {
    "truncated": ("train-images-idx3-ubyte", cut, "got only 7,055: it is truncated"),
    "too long": ("train-images-idx3-ubyte", lambda p: p.write_bytes(p.read_bytes() + b"x"), "got more"),
    "no header": ("train-labels-idx1-ubyte", lambda p: p.write_bytes(b"\0\0"), "got one that begins 00 00"),
    "empty": ("train-labels-idx1-ubyte", lambda p: p.write_bytes(b""), "begins with nothing"),
    "floats": ("train-images-idx3-ubyte", lambda p: p.write_bytes(b"\0\0\x0d\x03" + p.read_bytes()[4:]), "idx file of"),
    "axes": ("train-images-idx3-ubyte", lambda p: write_idx(p, some_bytes(9, 784)), "idx file of bytes with 3"),
    "larger": ("train-images-idx3-ubyte", lambda p: write_idx(p, some_bytes(9, 29, 28)), "28 x 28 pixels, got 29 x 28"),
    "huge": ("train-images-idx3-ubyte", lambda p: flipped(p, 4), "it is truncated"),
    "label": ("train-labels-idx1-ubyte", lambda p: flipped(p, 9), "must hold labels 0 to 9, got 254 for image 1"),
    "fewer labels": ("train-labels-idx1-ubyte", lambda p: write_idx(p, np.zeros(8, np.uint8)), "9 images of"),
    "no images": ("train-images-idx3-ubyte", lambda p: write_idx(p, some_bytes(0, 28, 28)), "images of"),
    "gzip truncated": ("t10k-images-idx3-ubyte.gz", lambda p: cut(p, 30), "truncated or damaged"),
    "gzip end truncated": ("t10k-images-idx3-ubyte.gz", lambda p: cut(p, 3), "truncated or damaged"),
    "gzip checksum": ("t10k-images-idx3-ubyte.gz", lambda p: flipped(p, -6), "truncated or damaged"),
    "gzip inside": ("t10k-labels-idx1-ubyte.gz", lambda p: flipped(p, 40), "truncated or damaged"),
    "not gzip": ("t10k-labels-idx1-ubyte.gz", lambda p: p.write_bytes(b"labels"), "truncated or damaged"),
    "gzip of less": ("t10k-labels-idx1-ubyte.gz", lambda p: p.write_bytes(
        gzip.compress(gzip.decompress(p.read_bytes())[:-1])), "got only 3: it is truncated"),
    "gzip label": ("t10k-labels-idx1-ubyte.gz", lambda p: write_idx(p, np.full(4, 10, np.uint8)), "got 10 for image 0"),
}  # fmt: skip


@subsets
@pytest.mark.parametrize("damage", IDX_DAMAGE)
def test_damaged_idx(refused, tmp_path, damage):
    write_mnist(tmp_path)
    name, do, wanted = IDX_DAMAGE[damage]
    do(tmp_path / name)
    message = refused(tmp_path)
    assert str(tmp_path / name) in message
    assert wanted in message
    assert "yann.lecun.com" in message


def edited(line, column, word):
    def edit(path):
        lines = path.read_text().splitlines()
        words = lines[line - 1].split()
        words[column : column + 1] = word.split()
        lines[line - 1] = " ".join(words)
        path.write_text("\n".join(lines) + "\n")

    return edit


AMAT_DAMAGE = {
    "one number less": (edited(3, 5, ""), "got 784 in line 3"),
    "one number more": (edited(2, 5, "0 0"), "got 786 in line 2"),
    "every line short": (lambda p: np.savetxt(p, np.zeros((3, 700))),
                         "785 numbers a line (784 grey values and a label), got 700 in line 1"),
    "torn line": (lambda p: cut(p, 4000), "in line 5"),
    "a word": (edited(4, 9, "grey"), "got 'grey' in line 4"),
    "not a number": (edited(4, 9, "nan"), "got 'nan' in line 4"),
    "infinite": (edited(1, 0, "inf"), "got 'inf' in line 1"),
    "too large": (edited(1, 0, "1e39"), "got '1e39' in line 1"),
    "a comment": (edited(2, 0, "#0.5"), "got '#0.5' in line 2"),
    "fraction for a label": (edited(5, 784, "2.5"), "the label from 0 to 9, got '2.5' in line 5"),
    "label 10": (edited(5, 784, "10"), "the label from 0 to 9, got '10' in line 5"),
    "label -1": (edited(2, 784, "-1"), "the label from 0 to 9, got '-1' in line 2"),
    "blank lines": (lambda p: (edited(3, 9, "grey")(p), p.write_text("\n\n" + p.read_text())), "got 'grey' in line 5"),
    "bytes": (lambda p: p.write_bytes(bytes(range(256)) * 99), "in line 1"),
    "empty": (lambda p: p.write_text(""), "must hold 50,000 images, got none"),
}  # fmt: skip


@subsets
@pytest.mark.parametrize("damage", AMAT_DAMAGE)
def test_damaged_amat(refused, tmp_path, damage):
    write_rotmnist(tmp_path)
    do, wanted = AMAT_DAMAGE[damage]
    do(tmp_path / AMAT["test"])
    message = refused(tmp_path)
    assert str(tmp_path / AMAT["test"]) in message
    assert wanted in message
    assert "mnist_rotation_new.zip" in message


@subsets
def test_damaged_cifar_binary(refused, tmp_path):
    write_cifar(tmp_path, 2)
    path = tmp_path / "data_batch_3.bin"
    flipped(path, 3073)
    assert f"{path} must hold labels 0 to 9, got 252 for image 1" in refused(tmp_path)
    cut(path)
    assert f"{path} must hold 3073 bytes an image, got 6,145 bytes" in refused(tmp_path)
    path.write_bytes(b"")
    assert f"{path} must hold 10,000 images, got none" in refused(tmp_path)


def changed(**entries):
    batch = cifar_batch(some_bytes(2, 3, 32, 32), [3, 5])
    return {**batch, **{name.encode(): value for name, value in entries.items()}}


PICKLE_DAMAGE = {
    "list": ([1], "another list"),
    "no labels": ({b"data": some_bytes(2, 3072)}, "a dictionary with b'data' and b'labels'"),
    "floats": (changed(data=np.zeros((2, 3072))), "an array of something else than bytes"),
    "signed": (changed(data=np.zeros((2, 3072), np.int8)), "an array of something else than bytes"),
    "objects": (changed(data=np.array([[1, [2]]], object)), "an array of something else than bytes"),
    "grey": (changed(data=some_bytes(2, 1024)), "3072 bytes an image in b'data', got shape (2, 1024)"),
    "flat": (changed(data=some_bytes(6144)), "got shape (6144,)"),
    "three axes": (changed(data=some_bytes(2, 3, 1024)), "whose shape does not fit"),
    "bytes": (changed(data=b"x" * 6144), "in b'data', got something else"),
    "fewer labels": (changed(labels=[3]), "a list of 2 labels in b'labels', got 1"),
    "array of labels": (changed(labels=np.zeros(2, np.uint8)), "labels in b'labels', got _Array"),
    "label 10": (changed(labels=[3, 10]), "labels 0 to 9 in b'labels', got something else for image 1"),
    "label -1": (changed(labels=[-1, 9]), "something else for image 0"),
    "label true": (changed(labels=[True, 9]), "something else for image 0"),
    "huge label": (changed(labels=[1 << 99999, 9]), "something else for image 0"),
}  # fmt: skip


@subsets
@pytest.mark.parametrize("damage", PICKLE_DAMAGE)
@pytest.mark.parametrize("dump", [python2_pickle, python3(2), python3(4)], ids=["python 2", "protocol 2", "protocol 4"])
def test_damaged_cifar_pickles(refused, tmp_path, damage, dump):
    write_cifar(tmp_path, 2, "python")
    path = tmp_path / "data_batch_2"
    batch, wanted = PICKLE_DAMAGE[damage]
    path.write_bytes(dump(batch))
    message = refused(tmp_path)
    assert message.startswith(f"{path} must be a pickled batch of CIFAR-10")
    assert wanted in message
    assert "www.cs.toronto.edu" in message


@subsets
@pytest.mark.parametrize("kept", [0, 1, 40, 3000, -300, -1])
def test_truncated_pickles(refused, tmp_path, kept):
    write_cifar(tmp_path, 2, "python")
    path = tmp_path / "test_batch"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} must be a pickled batch of CIFAR-10, got a truncated file" in refused(tmp_path)


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments, state=None):
        self.value = (function, arguments, *([] if state is None else [state]))

    def __reduce__(self):
        return self.value


def hostile(target):
    from functools import partial
    from os import system

    reconstruct = np.zeros(1, np.uint8).__reduce__()[0]
    writes = f"touch {target}"
    array = (reconstruct, np.ndarray, (0,), b"b")
    uint8 = np.dtype(np.uint8)
    return {
        "system": (Calls(system, writes), ".system"),
        "open": (Calls(open, str(target), "w"), ".open"),
        "eval": (Calls(eval, f"open({str(target)!r}, 'w')"), "builtins__.eval|builtins.eval|__builtin__.eval"),
        "getattr": (Calls(getattr, b"x", "join"), "getattr"),
        "partial": (partial(system, writes), "functools.partial|_reconstruct"),
        "in the data": (changed(data=Calls(system, writes)), ".system"),
        "in an array of objects": (changed(data=np.array([Calls(system, writes)], object)), "bytes|system"),
        "numpy.load": (Calls(np.load, str(target)), "numpy.load|numpy.lib"),
        "array called": (Calls(np.ndarray, (1 << 40,)), "TypeError"),
        "dtype of objects": (Calls(np.dtype, "O"), "something else than bytes"),
        "state of objects": (Calls(*array, state=(1, (1,), uint8, False, [system])), ".system"),
        "list for bytes": (Calls(*array, state=(1, (1,), uint8, False, [1])), "something else than bytes"),
        "text for a dtype": (Calls(*array, state=(1, (1,), "u1", False, b"1")), "something else than bytes"),
        "shape too large": (Calls(*array, state=(1, (1 << 40, 3072), uint8, False, b"1")), "does not fit"),
        "shape negative": (Calls(*array, state=(1, (-1, -1), uint8, False, b"1")), "does not fit"),
        "state too short": (Calls(*array, state=(1, (1,))), "ValueError"),
    }


ATTACKS = tuple(hostile("nowhere"))


@subsets
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_hostile_pickles(refused, tmp_path, attack, protocol):
    write_cifar(tmp_path, 2, "python")
    target, path = tmp_path / "written", tmp_path / "data_batch_1"
    value, wanted = hostile(target)[attack]
    path.write_bytes(pickle.dumps(value, protocol))
    message = refused(tmp_path)
    assert not target.exists()
    assert message.startswith(f"{path} must be a pickled batch of CIFAR-10")
    assert re.search(wanted, message)


def test_the_attack_would_work(tmp_path):
    """Python's own unpickler runs it."""
    target = tmp_path / "written"
    pickle.loads(pickle.dumps(hostile(target)["system"][0]))
    assert target.exists()


@subsets
def test_arrays_column_by_column(files, tmp_path):
    """Numpy pickles those with a flag."""
    written = write_cifar(tmp_path, 2, "python")["test_batch"]
    batch = cifar_batch(*written)
    batch[b"data"] = np.asfortranarray(batch[b"data"])
    (tmp_path / "test_batch").write_bytes(python2_pickle(batch))
    assert_holds(files.load(tmp_path).test, *written)


def h5(part, letter):
    return f"camelyonpatch_level_2_split_{part}_{letter}.h5"


H5_DAMAGE = {
    "truncated": (h5("valid", "x"), lambda p: cut(p, 1000), "a whole HDF5 file, got a truncated or damaged one"),
    "truncated labels": (h5("test", "y"), cut, "must be a whole HDF5 file, got a truncated or damaged one"),
    "table of names": (h5("test", "y"), lambda p: flipped(p, p.read_bytes().index(b"TREE")), "truncated or damaged"),
    "text": (h5("train", "x"), lambda p: p.write_text("images"), "must be a whole HDF5 file"),
    "other name": (h5("train", "x"), lambda p: write_h5(p, images=some_bytes(7, 96, 96, 3)), "got only ['images']"),
    "group": (h5("train", "x"), lambda p: write_h5(p, **{"x/y": some_bytes(7, 96, 96, 3)}), "got Group"),
    "channels first": (h5("train", "x"), lambda p: write_h5(p, x=some_bytes(7, 3, 96, 96)), "shape (7, 3, 96, 96)"),
    "floats": (h5("train", "x"), lambda p: write_h5(p, x=np.zeros((7, 96, 96, 3), "f4")), "got float32"),
    "scalar": (h5("train", "x"), lambda p: write_h5(p, x=np.uint8(1)), "shape ()"),
    "nothing": (h5("train", "x"), lambda p: write_h5(p, x=h5py.Empty("u1")), "shape None"),
    "no images": (h5("train", "x"), lambda p: write_h5(p, x=some_bytes(0, 96, 96, 3)), "0 images of"),
    "flat labels": (h5("train", "y"), lambda p: write_h5(p, y=np.zeros(7, np.uint8)), "got uint8 and shape (7,)"),
    "fewer labels": (h5("train", "y"), lambda p: write_h5(p, y=np.zeros((6, 1, 1, 1), np.uint8)), "7 images of"),
    "label 2": (h5("train", "y"), lambda p: write_h5(p, y=np.full((7, 1, 1, 1), 2, np.uint8)), "0 to 1, got 2 for"),
}  # fmt: skip


@subsets
@pytest.mark.parametrize("damage", H5_DAMAGE)
def test_damaged_h5(refused, tmp_path, damage):
    write_patchcamelyon(tmp_path)
    name, do, wanted = H5_DAMAGE[damage]
    do(tmp_path / name)
    message = refused(tmp_path)
    assert str(tmp_path / name) in message
    assert wanted in message
    assert "github.com/basveeling/pcam" in message


@subsets
def test_packed_h5(refused, tmp_path):
    write_patchcamelyon(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        path.rename(f"{path}.gz")
    path = tmp_path / h5("train", "x")
    message = refused(tmp_path, FileNotFoundError)
    assert f"{path} is missing; {path}.gz must be unpacked first: gunzip {path}.gz" in message


@subsets
def test_damage_behind_the_header_of_h5(files, tmp_path):
    """Found when the image is read."""
    write_patchcamelyon(tmp_path)
    path = tmp_path / h5("test", "x")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=some_bytes(2, 96, 96, 3), chunks=(1, 96, 96, 3), fletcher32=True)
    part = files.load(tmp_path).test
    before = part.images[:]
    flipped(path, -100)
    assert torch.equal(part.images[0], before[0])
    with pytest.raises(ValueError, match=re.escape(f"{path} must be a whole HDF5 file, got a truncated or damaged")):
        part.images[1]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{path} is missing")):
        part.images[0]


@subsets
def test_unreadable_files(refused, tmp_path, monkeypatch):
    write_cifar(tmp_path)

    def denied(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "fromfile", denied)
    message = refused(tmp_path)
    assert str(tmp_path / "data_batch_1.bin") in message
    assert "Permission denied" in message
