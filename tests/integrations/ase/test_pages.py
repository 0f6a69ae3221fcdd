"""The tables of systems on the pages of MACE and NequIP: each call and each setting makes a model that runs."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import yaml
from ase.build import molecule
from atoms import salt
from hosts import missing

from tg_equiattn.functional import charge_energies

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
DOCS = Path(__file__).parents[3] / "docs"


def column(host, pattern):
    """What stands in the last column of the page's table, each once."""
    return sorted(set(re.findall(rf"^\|.*\| `({pattern})` \|$", (DOCS / f"{host}.md").read_text(), re.MULTILINE)))


CALLS, SETTINGS = column("mace", r"add_long_range\(.*\)"), column("nequip", r"\{.*\}")


def systems(row):
    """Salts with forces between charges, or molecules; one has a charge where charges are predicted."""
    frames = [salt(), salt((2, 1, 1))] if "Na" in row else [molecule("CH3CH2OH"), molecule("H2O")]
    for number, atoms in enumerate(frames):
        atoms.rattle(0.05, seed=number)
        pos, forces = torch.tensor(atoms.positions, requires_grad=True), torch.zeros(len(atoms), 3)
        if "Na" in row:
            charges = torch.tensor([{"Na": 1.0, "Cl": -1.0}[symbol] for symbol in atoms.symbols])
            far = 14.4 * charge_energies(charges, pos, width=0.3, cell=torch.tensor(atoms.cell.array)).sum()
            forces = -torch.autograd.grad(far, pos)[0]
        atoms.info["charge"] = float(number) if "predicted" in row else 0.0
        atoms.info["energy"], atoms.arrays["forces"] = 0.0, forces.numpy()
    return frames


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_mace(call):
    if missing("mace"):
        pytest.skip("mace is not installed")
    host, frames = importlib.import_module("mace_models"), systems(call)
    names = {"model": host.make_mace(), "train_loader": host.loader(frames, 1), "train_batch": host.batch_of(*frames)}
    model = eval(call, {"add_long_range": host.add_long_range}, names)
    assert model(host.batch_of(*frames).to_dict())["forces"].isfinite().all()


@pytest.mark.parametrize("row", SETTINGS)
def test_settings_of_nequip(row):
    if missing("nequip"):
        pytest.skip("nequip is not installed")
    host, frames, settings = importlib.import_module("nequip_models"), systems(row), yaml.safe_load(row)
    options = settings.pop("long_range", {})
    if "charges" in settings:
        model = host.fit(host.make_nequip(options=options, **settings, **host.SCALES), host.labelled(*frames))
    else:
        model = host.make_nequip(options=options, **settings)
    assert model(host.labelled(*frames))["forces"].isfinite().all()


def test_both_pages_have_all_forms():
    for rows in (CALLS, SETTINGS):
        assert len(rows) == 6
        for form in ("scale", "predicted", "dielectric", "max_width"):
            assert sum(form in row for row in rows) == 1
