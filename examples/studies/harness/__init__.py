"""What all studies share. Without the packages that they need, a study prints what it does and what to install."""

import importlib.util
import sys
from pathlib import Path

HOSTS = {"ion_pairs": "mace,xtb", "polar_crystals": "mace,phonons", "real_molecules": "e3nn,xtb"}
_main = sys.modules["__main__"]
_path = Path(getattr(_main, "__file__", None) or "")
if _path.parent == Path(__file__).parents[1] and importlib.util.find_spec("lightning") is None:
    print(_main.__doc__)
    print(f"Install what it needs, from a clone: pip install '.[{HOSTS.get(_path.stem, 'escnn,pyg,e3nn')},examples]'")
    sys.exit(0 if {"--help", "-h"} & set(sys.argv) else 1)
