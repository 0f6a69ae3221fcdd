"""The quick starts are short, need nothing of the studies, run, and reach what the README says of them."""

import ast
import re
import runpy
import subprocess
import sys

import pytest
import torch
from running import EXAMPLES

HOSTS = ["e3nn", "escnn", "pyg"]
SCRIPTS = [EXAMPLES / f"quickstart_{host}.py" for host in HOSTS]


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


def test_there_is_one_for_every_host():
    found = {path.stem.removeprefix("quickstart_") for path in EXAMPLES.glob("quickstart_*.py")}
    assert found == {*HOSTS, "mace", "nequip"}  # whose are run where they are installed


@pytest.mark.parametrize("path", SCRIPTS, ids=HOSTS)
def test_it_is_short_and_stands_alone(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 60
    assert ast.get_docstring(tree).startswith("Quick start with ")
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name.startswith("tg_equiattn")}
    assert f"tg_equiattn.integrations.{path.stem.removeprefix('quickstart_')}" in ours
    known = {"escnn", "e3nn", "matplotlib", "pathlib", "sklearn", "torch", "torch_geometric", "tqdm"}
    assert {name.split(".")[0] for name in imported - ours} <= known  # no harness, no flags
    assert "_" not in {word[0] for name in ours for word in name.split(".")}


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
