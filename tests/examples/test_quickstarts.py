"""The quick starts are short, need nothing of the studies, run, and beat their rivals as README says."""

import re
import runpy
import subprocess
import sys

import pytest
from running import EXAMPLES

HOSTS = ["e3nn", "escnn", "pyg"]


def numbers(said):
    """The percentages of each model, by its name."""
    lines = [line for line in said.splitlines() if "of training" in line]
    return {line.split(":")[0]: [float(x) for x in re.findall(r"([\d.]+)%", line)] for line in lines}


def check(host, said, out):
    """Whether a run reached its goal; equivariance holds without training, too."""
    for error in re.findall(r"equivariance error (\S+)", said):
        assert float(error) < 1e-4
    assert (out / f"quickstart_{host}.png").stat().st_size > 5000
    rival, ours = numbers(said).values()
    if host == "escnn":
        return ours[0] > 80 > 2 * rival[0]
    # errors as in training, and on larger graphs
    return ours[0] < 2 and ours[1] < rival[1] / 3


@pytest.mark.parametrize("host", [pytest.param(host, marks=pytest.mark.slow) for host in HOSTS])
def test_it_runs(host, tmp_path, monkeypatch, capsys):
    """Two steps in place of all of them; no progress bar where there is no terminal."""
    trange = pytest.importorskip("tqdm").trange
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tqdm.trange", lambda count, **options: trange(2, **options))
    runpy.run_path(str(EXAMPLES / f"quickstart_{host}.py"), run_name="__main__")
    said = capsys.readouterr()
    assert said.err == ""
    assert not check(host, said.out, tmp_path / "out")  # so the numbers come of training


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_it_reaches_its_goal(host, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"quickstart_{host}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "arning:" not in done.stderr
    assert check(host, done.stdout, tmp_path / "out"), done.stdout
