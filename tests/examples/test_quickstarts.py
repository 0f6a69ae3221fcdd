"""The quick starts are short, need nothing of the studies, run, and reach what the README says of them."""

import re
import runpy
import subprocess
import sys

import pytest
import torch
from running import EXAMPLES

HOSTS = ["e3nn", "escnn", "pyg"]


def numbers(said):
    """By the line's first words, its percentages and plain numbers."""
    lines = [line for line in said.splitlines() if "equivariance error" in line]
    return {
        line.split(":")[0]: [float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e[-+]\d+)?(?=%|;|$)", line)]
        for line in lines
    }


def check(host, trained, out):
    """Of a run: what it printed against what it should reach, and its figure."""
    if host == "escnn":
        ((right, error),) = trained.values()
        good, equivariant = right > 93, error < 1e-5
    elif host == "pyg":
        (still, moved, change) = trained["relative positions"]
        usual = trained["positions as features"]
        good = still > 95 and moved == still and usual[0] > 90 and usual[1] < 50
        equivariant = change < 1e-5 and usual[2] > 0.1
    else:
        good = trained["with SE(3)-Hyena"][0] < 0.03 and trained["messages alone"][0] > 0.5
        equivariant = all(error < 1e-5 for _, error in trained.values())
    assert equivariant, trained
    assert (out / f"quickstart_{host}.png").stat().st_size > 5000
    return good


@pytest.mark.parametrize("host", ["e3nn", *(pytest.param(host, marks=pytest.mark.slow) for host in ("escnn", "pyg"))])
def test_it_runs(host, tmp_path, monkeypatch, capsys):
    """A few steps of one epoch in place of all of them; no progress bar where there is no terminal."""
    trange, permuted = pytest.importorskip("tqdm").trange, torch.randperm
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.randperm", lambda n, **options: permuted(n, **options)[: 160 if n == 1200 else n])
    monkeypatch.setattr("tqdm.trange", lambda count, **options: trange(1, **options))
    runpy.run_path(str(EXAMPLES / f"quickstart_{host}.py"), run_name="__main__")
    said = capsys.readouterr()
    assert said.err == ""
    good = check(host, numbers(said.out), tmp_path / "out")
    assert not good  # so the numbers come of training


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_it_reaches_its_goal(host, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"quickstart_{host}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "arning:" not in done.stderr
    assert check(host, numbers(done.stdout), tmp_path / "out"), done.stdout
