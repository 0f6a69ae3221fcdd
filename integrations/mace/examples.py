"""Small trained potentials with charges that are given, which load in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from mace.modules import interaction_classes
from mace.modules.models import MACE, ScaleShiftMACE, o3
from mace.tools.torch_tools import default_dtype

from ..e3nn.atoms_charges import layer_of_charges
from .long_range import _LONG_RANGE

FOLDER = Path(__file__).parent / "potentials"


def load_example(name: Literal["NaCl", "MgO"]) -> MACE:
    """A trained MACE with charges that are given, in float64. ``integrations/mace/potentials/README.md`` has the data,
    the errors and the limits of each potential: they are for phonons of the perfect crystal, and for tests.

    Args:
        name: "NaCl" or "MgO", which are rocksalt crystals.

    Raises:
        ValueError: if there is no such potential.

    Example::

        calculator = LongRangeCalculator(models=load_example("NaCl"))
    """
    names = sorted(path.stem for path in FOLDER.glob("*.pt"))
    if name not in names:
        raise ValueError(f"name must be one of {', '.join(names)}, got {name!r}")
    saved = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    with default_dtype("float64"):
        model, charges = build_example(**saved["model"]), saved["charges"]
        layer = layer_of_charges(names=list(charges["charges"]), learn=False, kind="element", irreps=(), **charges)
    model.__class__, model.readouts[-1].long_range = _LONG_RANGE[type(model)], layer
    model.load_state_dict(saved["state"])
    return model.eval()


def build_example(atomic_numbers: list[int], avg_num_neighbors: float) -> ScaleShiftMACE:
    """The potential without charges before its training."""
    block: Any = interaction_classes["RealAgnosticResidualInteractionBlock"]
    return ScaleShiftMACE(
        r_max=5.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=len(atomic_numbers), hidden_irreps=o3.Irreps("8x0e + 8x1o"), correlation=2,
        MLP_irreps=o3.Irreps("16x0e"), gate=torch.nn.functional.silu, atomic_numbers=atomic_numbers,
        atomic_energies=np.zeros(len(atomic_numbers)), avg_num_neighbors=avg_num_neighbors, atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )  # fmt: skip
