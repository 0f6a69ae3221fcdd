"""Scripts of a user of MACE, NequIP and ASE, where these are installed: trained, saved, loaded, run."""

import re
import subprocess
import sys

import pytest
from hosts import missing
from running import EXAMPLES

pytestmark = pytest.mark.slow


def said(host, script, folder, *options):
    if missing(host):
        pytest.skip(f"{host} is not installed")
    pytest.importorskip("tblite")
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("host", ["mace", "nequip"])
def test_quick_start(host, tmp_path):
    """Energy is kept in NVE as well as by the host's own model, but for what two trained models differ in."""
    lines = said(host, f"quickstart_{host}.py", tmp_path).splitlines()[-2:]
    own, far = ([float(x) for x in re.findall(r"[\d.]+", line.split(":", 1)[1])] for line in lines)
    assert "long range" in lines[1]
    assert far[0] < 1.5 * own[0]
    assert far[1] < 1.5 * own[1]


def test_crystal(tmp_path):
    out = said("mace", "ase_crystal.py", tmp_path)
    numbers = {name: float(x) for name, x in re.findall(r"(stress against differences|supercell): (\S+) relative", out)}
    assert numbers["stress against differences"] < 1e-6
    assert abs(numbers["supercell"]) < 1e-6
    assert abs(float(re.search(r"drift (\S+) meV", out)[1])) < 0.5
    assert "relaxation: done" in out
