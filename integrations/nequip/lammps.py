"""Models of NequIP with charges that are given, for LAMMPS on many processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from ..lammps import STYLE, kspace_input
from .long_range import LongRangeCharges

_STYLES = {
    "mliap": "mliap unified near.nequip.lmp.pt 0, mliap",
    "nequip": "nequip, nequip near.nequip.pt2",
    STYLE: f"{STYLE}, {STYLE}",
}


def write_lammps(
    model: torch.nn.Module, folder: str | Path, *, types: Sequence[str] | None = None,
    pair_style: Literal["mliap", "nequip", "tg_equiattn"] = "mliap", slab: bool = False,
) -> None:  # fmt: skip
    """Write the input file for a model with charges that are given for LAMMPS, in which LAMMPS's kspace has the energy
    of the charges.

    NequIP's commands write the model without charges, by the modifier ``charges_in_lammps``:
    ``nequip-prepare-lmp-mliap best.ckpt near.nequip.lmp.pt --modifiers charges_in_lammps`` for the pair style
    ``mliap``, which runs on any number of processes, and ``nequip-compile best.ckpt near.nequip.pt2 --mode aotinductor
    --target pair_nequip --device cpu --modifiers charges_in_lammps`` for ``nequip``. Energies of atoms of these models
    contain what kspace leaves out, so total energies are those of the model. ``potential.lammps`` is to be included
    after the atoms exist. It sets charges, and stops if masses are not those of the types, or if the charges do not sum
    to zero.

    Args:
        model: A model with :class:`LongRangeCharges`, with ``learn: false`` or ``scale``, as
            ``nequip.model.saved_models.load_utils.load_saved_model("best.ckpt")`` returns it.
        folder: Folder of the file, which is made. Run LAMMPS there.
        types: The name of each of LAMMPS's types of atoms. The default, ``None``, means the types of the model.
        pair_style: "mliap" or "nequip" as NequIP names them, or "tg_equiattn", for
            :func:`tg_equiattn.integrations.lammps.run_lammps` with a model that is compiled with the modifier and
            ``--target ase``. The default is "mliap".
        slab: True if z is open. The default is ``False``.

    Raises:
        ValueError: if charges are not given, or if a type has no charge in the model.
    """
    layer = next((x.interaction for x in model.modules() if isinstance(x, LongRangeCharges)), None)
    names = (() if layer is None else layer.names) if types is None else types
    text = kspace_input(layer, _STYLES, pair_style, list(names), slab)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "potential.lammps").write_text(text)
