"""Models of MACE with charges that are given, for LAMMPS on many processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from ase.data import chemical_symbols
from mace.modules.models import MACE

from ..e3nn.atoms_charges import energies_beside_kspace
from ..lammps import STYLE, kspace_input
from .long_range import without_long_range

_STYLES = {
    "mliap": "mliap unified near.model-mliap_lammps.pt 0, mliap",
    "mace": "mace, mace near.model-lammps.pt",
    STYLE: f"{STYLE}, {STYLE}",
}


def write_lammps(
    model: MACE, folder: str | Path, *, types: Sequence[str] | None = None,
    pair_style: Literal["mliap", "mace", "tg_equiattn"] = "mliap", slab: bool = False,
) -> None:  # fmt: skip
    """Write a model with charges that are given for LAMMPS, on any number of processes: the model without charges, and
    an input file in which LAMMPS's kspace has the energy of the charges.

    ``near.model`` is a model of MACE without this library. Its energies of atoms contain what kspace leaves out, so
    total energies are those of the model. ``mace_create_lammps_model near.model --format=mliap`` makes the file of the
    pair style ``mliap`` (it needs cuequivariance), and without ``--format`` that of ``mace``.
    ``potential.lammps`` is to be included after the atoms exist. It sets charges, and stops if masses are not those of
    the types, or if the charges do not sum to zero.

    Args:
        model: A model made by ``add_long_range(model, charges={...})``, with ``learn=False`` or "scale".
        folder: Folder of the files, which is made. Run LAMMPS there.
        types: The element of each of LAMMPS's types of atoms. The default, ``None``, means the elements of the model
            in their order.
        pair_style: "mliap" or "mace" as MACE names them, or "tg_equiattn", in which
            :func:`tg_equiattn.integrations.lammps.run_lammps` runs ``near.model`` on one process. The default is
            "mliap".
        slab: True if z is open. The default is ``False``.

    Raises:
        ValueError: if charges are not given, or if a type has no charge in the model.

    Example::

        write_lammps(torch.load("far.model", weights_only=False), "lammps", types=["Cl", "Na"])
    """
    names = [chemical_symbols[z] for z in model.atomic_numbers.tolist()] if types is None else list(types)
    text = kspace_input(getattr(model, "long_range", None), _STYLES, pair_style, names, slab)
    near = without_long_range(model).cpu()
    energies = near.atomic_energies_fn.atomic_energies
    energies += energies_beside_kspace(model.long_range).to(energies)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(near, folder / "near.model")
    (folder / "potential.lammps").write_text(text)
