"""Forces, stress and gradients of a loss on forces in a MACE with long range, by every method."""

import pytest
import torch
from atoms import check_derivatives, salt, waters
from mace_models import batch_of
from tg_equiattn.integrations.mace import add_long_range

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
CHARGES = {"H": 0.4, "O": -0.8, "Na": 1.0, "Cl": -1.0}


@pytest.mark.parametrize("method", ["direct", "ewald", "nufft"])
@pytest.mark.parametrize("after", [(0,), (0, 1), "charges"])
def test_derivatives(after, method, make):
    if method == "nufft":
        pytest.importorskip("finufft")
    atoms = waters(2.5) if method == "direct" else salt()
    options = {"batch": batch_of(atoms), "method": method, "error": 1e-9 if method == "nufft" else 1e-6}
    if after == "charges":
        options |= {"charges": CHARGES, "learn": True}
    else:
        options |= {"after": after, "gain": 0.5, "num_gaussians": 1, "num_coulomb": 1}
    model, data = add_long_range(make(), **options), batch_of(atoms).to_dict()
    own = [x for name, x in model.named_parameters() if "long_range" in name and x.requires_grad]
    with torch.no_grad():
        for x in own:
            x += 0.2 * torch.randn_like(x)

    def call(moved, strain):
        matrix = torch.eye(3) + strain
        near = data | {"positions": (data["positions"] + moved) @ matrix}
        near |= {name: data[name] @ matrix for name in ("cell", "shifts")}
        out = model(near, training=True, compute_stress=method != "direct")
        return out["energy"], out["forces"], out["stress"] if method == "direct" else out["stress"][0]

    check_derivatives(call, data["positions"], own, atoms.get_volume() if atoms.pbc.all() else None)
