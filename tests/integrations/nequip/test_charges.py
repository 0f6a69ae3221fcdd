"""Charges that are given, in NequIP: energies, derivatives, the fit before training, labels, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from ase.build import molecule
from atoms import salt
from nequip.train import MeanSquaredError, MetricsManager
from nequip_models import fit, frame, frames, labelled, layer_of, make, make_nequip
from space import error

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
CHARGES = {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}


def charged(learn=False, **options):
    """A model of which every parameter counts."""
    model = make(charges=CHARGES, learn=learn, **options)
    if learn is True:
        layer = layer_of(model)
        with torch.no_grad():
            layer.weights.normal_(0, 3)
            layer.scale.fill_(1.1)
    return model


def test_a_loss_of_the_shared_charge_lowers_it():
    """By NequIP's own metrics, as a step of its training module computes them."""
    coefficients = {"total_energy": 1e-3, "forces": 1e-3, "shared_charge": 10.0}
    metrics = [{"field": name, "coeff": x, "metric": MeanSquaredError()} for name, x in coefficients.items()]
    loss, batch = MetricsManager(metrics), labelled(molecule("OH"), molecule("H2O"), molecule("CO2"))
    batch |= {"charge": torch.tensor([[-1.0], [0.0], [0.0]]), "total_energy": torch.zeros(3, 1)}
    model = make(charges="predicted").train()
    for p in layer_of(model).parameters():
        p.data += torch.randn_like(p)
    optimizer, sizes = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(30):
        out = model(dict(batch))
        optimizer.zero_grad()
        loss(out, batch | {"shared_charge": torch.zeros(3, 1)})["weighted_sum"].backward()
        optimizer.step()
        sizes.append(out["shared_charge"].square().mean().item())
    assert sizes[-1] < 0.05 * sizes[0]


def test_the_fit_sets_offsets_and_scales():
    """Once: another fit of a fitted model changes nothing. Scales are those of forces without those of charges."""
    batch = labelled(salt(), molecule("H2O"))
    model, plain = charged(), charged(systems=[molecule("H2O")])
    kept = copy.deepcopy(model.state_dict())
    fit(model, labelled(salt()))
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, kept[name], rtol=0, atol=0, equal_nan=True)
    network, layer = model.model.func, layer_of(model)
    out = model(dict(batch))["forces"]
    layer.constants.zero_()
    rest = batch["forces"] - (out - model(dict(batch))["forces"])
    assert error(network.per_type_energy_scale_shift.scales[0, 0], 1.3 * rest.norm() / batch["forces"].norm()) < 1e-8
    assert error(layer_of(plain).offsets, layer.offsets) > 1e-3


def test_it_learns_from_born_charges():
    """As NequIP's trainer does, in training mode: every parameter of ours moves."""
    model, atoms = charged(True).train(), salt()
    layer, batch = layer_of(model), frames(atoms)
    wanted = torch.eye(3) * torch.tensor([1.0 if s == "Na" else -1.0 for s in atoms.symbols])[:, None, None]
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=0.02), []
    for _ in range(20):
        out = model(dict(batch))
        loss = (out["born_effective_charges"] - wanted).square().mean() + 1e-6 * out["forces"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_what_is_refused():
    data = labelled(salt())
    del data["charge"]
    with pytest.raises(ValueError, match="total_charge must be given for predicted charges"):
        fit(make_nequip(charges="predicted", options={}), data)
    with pytest.raises(ValueError, match=r'say what charges are for charges="predicted", got no graph .* leave out'):
        fit(make_nequip(charges="predicted", options={}), labelled(salt(), molecule("H2O")))
    with pytest.raises(
        ValueError, match="charges must be a dictionary of finite numbers or 'predicted', got 'learned'"
    ):
        make_nequip(charges="learned", options={})
    with pytest.raises(ValueError, match='charges must be a charge for each type, or "predicted" without learn'):
        make_nequip(charges="predicted", options={"born_charges": True})
    with pytest.raises(ValueError, match="charges must be fitted before training: add FitCharges to the trainer's"):
        make_nequip(charges=CHARGES)(frame(salt()))
    with pytest.raises(ValueError, match="names of types of the model, 'H', 'C', 'O', 'Na', 'Cl', got 'K'"):
        make_nequip(charges={"K": 1})
    with pytest.raises(ValueError, match="names of types of the model, 'H', 'C', 'O', 'Na', 'Cl', got 11, 17"):
        make_nequip(charges={11: 1, 17: -1})
    silent = labelled(salt())
    del silent["forces"]
    with pytest.raises(ValueError, match='batches must have forces of the data with learn="scale", got none'):
        fit(make_nequip(charges={"Na": 1, "Cl": -1}, options={"learn": "scale"}), silent)
    with pytest.raises(ValueError, match=r"learn must be True or False or 'scale', got 1\.5"):
        make_nequip(charges=CHARGES, options={"learn": 1.5})
    with pytest.raises(ValueError, match="charge for the element of every atom, got none for C"):
        charged()(frame(molecule("CH3OH")))
    model, ion = charged(), molecule("OH")
    with pytest.raises(ValueError, match=r"in graph 0 they sum to -0\.4, and no total_charge is given"):
        model(frame(ion))
    assert np.isfinite(model(frame(ion) | {"charge": torch.tensor([[-0.4]])})["total_energy"].item())
