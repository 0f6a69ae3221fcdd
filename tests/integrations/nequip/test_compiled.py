"""Compiled ahead of time for ASE: the eager model's numbers, for other cells and atoms without compiling again."""

import zipfile

import pytest
import torch
from ase.build import molecule
from atoms import salt
from nequip.nn.compile import DictInputOutputWrapper
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT
from nequip.utils.aot import aot_export_model
from nequip_models import frame, make_nequip

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.usefixtures("double")]


def compiled(model, data, folder):
    """As nequip-compile --mode aotinductor --target ase does."""
    target = COMPILE_TARGET_DICT["ase"]
    sizes = {name: torch.export.Dim(f"num_{name}s", min=2) for name in ("graph", "node", "edge")}
    sizes = target["batch_map_settings"](sizes)
    path = aot_export_model(
        model, "cpu", target["input"], target["output"], target["data_settings"](dict(data)), sizes,
        str(folder / "far.nequip.pt2"), inductor_configs={"aot_inductor.metadata": {}},
    )  # fmt: skip
    with zipfile.ZipFile(path) as package:  # which runs without this library
        assert not any(b"tg_equiattn::" in package.read(name) for name in package.namelist())
    return DictInputOutputWrapper(torch._inductor.aoti_load_package(path), target["input"], target["output"])


def boxed(name):
    """In a cell, without which NequIP's own check of a compiled model meets a stress that is no number."""
    atoms = molecule(name)
    atoms.center(vacuum=5.0)
    return atoms


@pytest.mark.parametrize("charges", [None, {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8, "C": -0.8}])
@pytest.mark.parametrize("method", ["ewald", "direct"])
def test_compiled_model(method, charges, tmp_path):
    crystals = method == "ewald"
    options = {"method": method} | ({"max_hkl": (12, 7, 7)} if crystals else {})
    options |= {} if charges is None else {"learn": True, "width": 1.2, "born_charges": True}
    model = make_nequip(options=options, charges=charges, num_features=4)
    if charges is not None:
        layer = model.model.func.long_range.interaction
        torch.nn.init.normal_(layer.weights)
        layer.offsets.fill_(0.1)
    systems = [salt((2, 1, 1)), salt()] if crystals else [boxed("CH3CH2OH"), boxed("H2O")]
    loaded = compiled(model, frame(systems[0]), tmp_path)
    for atoms in systems:
        wanted, got = model(frame(atoms)), loaded(frame(atoms))
        for name in ("total_energy", "forces") + crystals * ("stress",):
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-9, atol=1e-12)
    refused, message = (
        (salt((4, 1, 1)), "max_hkl must be larger for kernels of this width and these cells")
        if crystals
        else (salt(), "no edge must cross")
    )
    with pytest.raises(RuntimeError, match=message):
        loaded(frame(refused))
    if charges and not crystals:
        with pytest.raises(RuntimeError, match="charges of a graph must sum to its total charge"):
            loaded(frame(boxed("OH")))
