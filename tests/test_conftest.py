"""What the fixtures of all tests refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch

def test_leaks():
    torch.set_default_dtype(torch.float64)

def test_does_not_notice():
    assert torch.get_default_dtype() == torch.float32
"""


@pytest.mark.slow
def test_a_default_dtype_left_behind_fails_the_test_that_left_it(tmp_path):
    """Negative control, in a process of its own."""
    here = Path(__file__).parent
    (tmp_path / "test_it.py").write_text(CODE)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rE", str(tmp_path)]
    environment = {"PYTHONPATH": f"{here}:{here / 'helpers'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert "2 passed, 1 error" in done.stdout
    assert "the test left torch.float64 as the default dtype, it found torch.float32" in done.stdout
