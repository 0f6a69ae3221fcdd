import shutil
import subprocess
import sys
from pathlib import Path

import tg_equiattn

HOSTS = {"escnn": "escnn", "pyg": "torch_geometric", "e3nn": "e3nn", "mace": "mace", "nequip": "nequip"}
CODE = f"""
import importlib, sys
class Hide:
    hidden = {{*{[*HOSTS.values()]}, "sklearn", "matplotlib", "lightning", "scipy", "numpy"}}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
hide = Hide()
sys.meta_path.insert(0, hide)
import tg_equiattn
print("torch" in sys.modules)
tg_equiattn.nn.GroupAttention, tg_equiattn.functional, tg_equiattn.testing
for extra, host in {HOSTS}.items():
    hide.hidden = {{host}}
    try:
        importlib.import_module(f"tg_equiattn.integrations.{{extra}}")
        print("imported")
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_a_missing_host_is_named_with_the_extra_that_brings_it():
    """The core needs torch alone, once it is used; an integration whose host is missing says how to install it."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    first, *others = result.stdout.strip().splitlines()
    assert first == "False"
    for extra, said in zip(HOSTS, others, strict=True):
        assert said.startswith("ImportError")
        assert f"pip install '.[{extra}]'" in said


def test_two_checkouts_are_refused(tmp_path):
    """A copy of the core in the current folder is imported before the installed one."""
    (tmp_path / "tg_equiattn").symlink_to(Path(tg_equiattn.__file__).parent, target_is_directory=True)
    copy = tmp_path / "other" / "tg_equiattn"
    shutil.copytree(Path(tg_equiattn.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, refused in ((tmp_path, False), (copy.parent, True)):
        command = [sys.executable, "-c", "import tg_equiattn.integrations"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert ("which are two checkouts" in result.stderr) == refused, result.stderr
