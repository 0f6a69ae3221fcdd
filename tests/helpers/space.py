"""Motions of space, and the error relative to the largest value, for tests of equivariance."""

import contextlib
from unittest import mock

import torch

from tg_equiattn.chains import clifford_algebra as clifford


def motion(dtype=torch.float64, reflect=False, device=None):
    """A random rotation matrix, or that times -1."""
    r, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    r = r * torch.linalg.det(r).sign() * (-1 if reflect else 1)
    return r.to(dtype=dtype) if device is None else r.to(device, dtype)


def move(x, r):
    return x @ r.T


def move_multivectors(x, r):
    """(..., 8): scalars stay, vectors turn, bivectors turn as axial vectors, pseudoscalars change sign if reflected."""
    parity = torch.linalg.det(r)
    scalar, vector, bivector, pseudoscalar = x.split([1, 3, 3, 1], -1)
    return torch.cat([scalar, vector @ r.T, parity * bivector @ r.T, parity * pseudoscalar], -1)


def error(got, wanted):
    """The worst error of tensors or tuples of them, relative to the largest value of each."""
    if isinstance(got, torch.Tensor):
        got, wanted = (got,), (wanted,)
    parts = [(a, b) for a, b in zip(got, wanted, strict=True) if b.numel()]
    assert parts
    assert all(a.shape == b.shape and float(b.detach().abs().max()) > 1e-3 for a, b in parts)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in parts)


def batch_of(sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


@contextlib.contextmanager
def broken_cross_product():
    """Multiply vectors component by component, which rotations do not commute with."""
    few = "channelwise_product_of_components"

    def product_of_few(weight, x, y, tables):
        more = len(tables.right) // len(x) - len(x)
        return torch.nn.functional.pad(x * y, (0, 0, 0, 0, 0, more))

    with (
        mock.patch.object(clifford, "cross_product", lambda a, b, dim: a * b),
        mock.patch.object(clifford, few, product_of_few),
    ):
        yield


def take_weights(module, other):
    """Load the weights of a module with other settings, which by itself a checkpoint refuses."""
    weights = {name: x for name, x in other.state_dict().items() if not name.endswith("_extra_state")}
    module.load_state_dict(weights, strict=False)
