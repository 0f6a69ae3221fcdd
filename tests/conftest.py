"""Fixtures and helpers shared by all tests."""

import copy
import io
import os
import pickle

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: its kernels are interpreted on the CPU then
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tg_equiattn.groups import cyclic, dihedral, mirror, octahedral, trivial

PLANAR = {"C2": cyclic(2), "C4": cyclic(4), "C8": cyclic(8), "D2": dihedral(2), "D4": dihedral(4), "mirror": mirror()}
GROUPS = {**PLANAR, "octahedral": octahedral(), "trivial": trivial()}

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


class OneDevice(TorchDispatchMode):
    """Refuse every operation on a tensor (not a scalar) that is not on the meta device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and x.ndim and x.device.type != "meta":
                raise AssertionError(f"{func} met a tensor on {x.device}")
        return out


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def randomise():
    """Give every parameter of a module random values, so that no zero hides an error."""

    def fill(module, std=0.7):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=std)
        return module

    return fill


@pytest.fixture
def check_copies():
    """state_dict (weights_only), pickle and deepcopy of a module give equal outputs."""

    def check(make, module, x):
        expected = module(x)
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        buffer.seek(0)
        loaded = make()
        loaded.load_state_dict(torch.load(buffer, weights_only=True))
        for other in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(other(x), expected, rtol=0, atol=0)

    return check
