"""Layers for escnn, PyG and e3nn, and long range for MACE, NequIP and LAMMPS. Each module imports its host and says
which extra brings it."""

from pathlib import Path as _Path

import tg_equiattn as _core

_here, _core_folder = _Path(__file__).resolve().parent, _Path(_core.__file__).resolve().parent
if _here not in (_core_folder / "integrations", _core_folder.parent / "integrations"):
    raise ImportError(
        f"tg_equiattn is imported from {_core_folder} and tg_equiattn.integrations from {_here}, which are two "
        "checkouts: run `pip install --no-deps --no-build-isolation -e .` in the one that you want, or start Python in "
        "another folder"
    )
