"""Backends that cannot run are refused by every function and layer that has a kernel, and by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import FUNCTIONS, LAYERS, call, refusals

from tg_equiattn.functional.backend import use_triton

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.parametrize("name", FUNCTIONS | LAYERS)
@pytest.mark.parametrize("bad", ["cuda", "Triton", None])
def test_unknown_backends_are_refused(name, bad):
    with pytest.raises(
        ValueError, match=rf"backend must be one of \('auto', 'torch', 'triton', 'plain'\), got {bad!r}"
    ):
        call(name, bad)


def test_kernels_want_a_gpu():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"for tensors that are not on a CUDA device .* got 'triton' with tensors on"):
        use_triton("triton", torch.device("meta"))


def without(statement, **environment):
    """The refusals of all three backends, in a process where something is missing."""
    code = f"{statement}\nimport json\nfrom backends import refusals\n"
    code += "print(json.dumps({b: refusals(b) for b in ('auto', 'torch', 'triton')}))"
    rest = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    rest |= {"PYTHONPATH": str(HELPERS), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=rest)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import sys; sys.modules['triton'] = None", "without Triton (pip install triton)"),
        ("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''", "for tensors that are not on a CUDA device"),
    ],
)
def test_without_triton_or_a_gpu(statement, message):
    """Nothing but a backend that was asked for by name needs them."""
    said = without(statement)
    assert set(said["auto"].values()) == set(said["torch"].values()) == {""}
    if message.startswith("for tensors"):
        pytest.importorskip("triton")
    assert all(f"backend must be 'auto', 'torch' or 'plain' {message}" in text for text in said["triton"].values())


def test_refusals_are_counted():
    """Negative control: where nothing is refused, nothing is said."""
    assert set(refusals("torch").values()) == {""}
