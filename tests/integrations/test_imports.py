import subprocess
import sys

import pytest

HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


def run(code, hidden):
    source = HIDE.format(hidden=hidden) + code
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)


def test_core_needs_torch_alone():
    hidden = {"escnn", "torch_geometric", "e3nn", "sklearn", "matplotlib", "lightning", "scipy", "numpy"}
    code = "import tg_equiattn.nn, tg_equiattn.functional, tg_equiattn.testing; print('fine')"
    assert run(code, hidden).stdout.strip() == "fine"


HOSTS = [("escnn", "escnn"), ("pyg", "torch_geometric"), ("e3nn", "e3nn"), ("mace", "mace"), ("nequip", "nequip")]


@pytest.mark.parametrize(("extra", "host"), HOSTS)
def test_missing_host(extra, host):
    result = run(f"import tg_equiattn.integrations.{extra}", {host})
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError")
    assert f"pip install '.[{extra}]'" in last
