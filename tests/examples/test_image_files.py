"""Published image files are read as they were written, and what is damaged or missing is refused by name."""

import gzip

import numpy as np
import pytest
from data.image_files import load_mnist_test


def some_bytes(*shape, seed=0):
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def write_mnist(folder, packed):
    for name, array in (("images-idx3", some_bytes(4, 28, 28)), ("labels-idx1", np.arange(4, dtype=np.uint8))):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        path = folder / f"t10k-{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(header + array.tobytes()) if packed else header + array.tobytes())


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_as_it_was_written(tmp_path, packed):
    with pytest.raises(FileNotFoundError, match=r"t10k-images-idx3-ubyte is missing\. MNIST: "):
        load_mnist_test(tmp_path)
    write_mnist(tmp_path, packed)
    images, labels = load_mnist_test(tmp_path)
    assert (255 * images[:, 0]).round().int().tolist() == some_bytes(4, 28, 28).tolist()
    assert labels.tolist() == [0, 1, 2, 3]


def test_damaged_files(tmp_path):
    write_mnist(tmp_path, False)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte and .* must hold images of 28 x 28"):
        load_mnist_test(tmp_path)
