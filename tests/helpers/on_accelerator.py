"""Run a script of the examples with ``--device cuda`` where there is none: on the emulated accelerator.

    python tests/helpers/on_accelerator.py examples/benchmarks/first_gpu.py --tiny --device cuda

Unlike the tests' accelerator this one may be waited for and copied to, as set-up and timing do; what lies elsewhere is
refused in any operator. Nothing is compiled. Scripts that the script starts run on it too.
"""

import contextlib
import runpy
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from emulated import DEVICE, Accelerator, Calls, Emulated, aten, emulated, to_accelerator, values
from torch.utils._pytree import tree_map

NAME = "Emulated accelerator"
SCRIPT = [sys.executable, "-W", "ignore"]


class _Patient(Accelerator):
    """Refuse operators on tensors of both places alone."""

    def inside(self):
        return contextlib.nullcontext()

    def run(self, func, types, args, kwargs):
        if func.overloadpacket is aten.copy_:
            func(*map(values, args), **kwargs)
            return args[0]
        if func.overloadpacket is aten._to_copy and kwargs.get("device") is not None:
            out = func(values(args[0]), **{**kwargs, "device": "cpu"})
            return emulated(out) if kwargs["device"] == DEVICE else out
        return super().run(func, types, args, kwargs)

    def _check(self, func, args, kwargs, tensors, moves):
        here = [tuple(x.shape) for x in tensors if not isinstance(x, Emulated) and x.ndim]
        assert not here, f"{func} met tensors of shapes {here} on the CPU"


class _Cuda(Calls):
    """What is asked of the device cuda is asked of the emulated one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(there, args), tree_map(there, kwargs or {})
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            return func(values(args[0]))
        return super().__torch_function__(func, types, args, kwargs)


def there(x):
    """A device, or its name, as the emulated one if it is a GPU."""
    is_cuda = (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")
    return DEVICE if is_cuda else x


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def flex_attention(query, key, value, score_mod, block_mask, scale):
    """torch's, whose kernels know no emulated tensors, by its formula."""
    i, j = (torch.arange(n, device=query.device) for n in (query.shape[-2], key.shape[-2]))
    b, h = (torch.arange(n, device=query.device) for n in query.shape[:2])
    index = b[:, None, None, None], h[:, None, None], i[:, None], j
    scores = score_mod(query @ key.mT * scale, *index)
    return torch.where(block_mask.mask_mod(*index), scores, -torch.inf).softmax(-1) @ value


def patches():
    """torch.cuda as it would answer with one device, and what cannot run on it."""
    cuda = {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda *_: NAME, "Event": Event,
        "mem_get_info": lambda *_: (2**36, 2**36), "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 1,
    }  # fmt: skip
    cuda["get_sync_debug_mode"] = lambda: 0
    cuda["make_graphed_callables"] = lambda model, *_: model
    silent = (
        "set_sync_debug_mode", "synchronize", "set_device", "reset_peak_memory_stats", "empty_cache",
        "set_per_process_memory_fraction",
    )  # fmt: skip
    cuda |= {name: lambda *_: None for name in silent}
    move, start = torch.nn.Module.to, subprocess.run
    yield mock.patch.multiple(torch.cuda, **cuda)
    yield mock.patch.object(torch, "compile", lambda function, **_: function)
    yield mock.patch("torch.nn.attention.flex_attention.flex_attention", flex_attention)
    yield mock.patch.object(
        torch.nn.Module, "to",
        lambda self, *args, **more: to_accelerator(self) if DEVICE in map(there, args) else move(self, *args, **more),
    )  # fmt: skip
    yield mock.patch.object(
        subprocess, "run",
        lambda command, **more: start(
            [*SCRIPT, __file__, *command[3:]] if command[:3] == SCRIPT else command, **more
        ),
    )  # fmt: skip


def main():
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    with contextlib.ExitStack() as stack:
        for each in (*patches(), _Cuda(), _Patient()):
            stack.enter_context(each)
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
