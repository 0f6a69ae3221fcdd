"""Forces, stress and gradients of a loss on forces in a NequIP with long range, by every method."""

import pytest
import torch
from atoms import check_derivatives, salt, waters
from nequip_models import frame, make_nequip

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


@pytest.mark.parametrize("method", ["direct", "ewald", "nufft"])
@pytest.mark.parametrize("after", [(0,), (0, 1)])
def test_derivatives(after, method):
    if method == "nufft":
        pytest.importorskip("finufft")
    atoms = waters(2.5) if method == "direct" else salt()
    options = {"method": method, "error": 1e-9 if method == "nufft" else 1e-6, "num_gaussians": 1, "num_coulomb": 1}
    model, data = make_nequip(after=after, options=options).train(), frame(atoms)

    def call(moved, strain):
        matrix = torch.eye(3) + strain
        near = {"pos": (data["pos"] + moved) @ matrix} | ({"cell": data["cell"] @ matrix} if atoms.pbc.all() else {})
        out = model(data | near)
        return out["total_energy"], out["forces"], out["stress"][0]

    own = [x for name, x in model.named_parameters() if "long_range" in name]
    check_derivatives(call, data["pos"], own, atoms.get_volume() if atoms.pbc.all() else None)
