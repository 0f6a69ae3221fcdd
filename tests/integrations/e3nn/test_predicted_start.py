"""The fit of predicted charges to total charges and to forces between separate fragments, before training."""

import pytest
import torch
from tg_equiattn.integrations.e3nn.atoms_attention import Atoms
from tg_equiattn.integrations.e3nn.atoms_charges import Sample, fit_predicted_charges

from tg_equiattn.nn import PredictedChargeInteraction

COULOMB = 14.3996454785


@pytest.fixture(autouse=True)
def _double(double):
    """In double precision."""


def pairs(count, charges, neutral=False):
    """Graphs of two fragments of one or two nodes, with features that know the kind of the fragment; total charges; the
    forces between point charges at their centers."""
    torch.manual_seed(3)
    kinds = torch.randint(len(charges), (count, 2))
    if neutral:
        kinds[:, 1] = 1 - kinds[:, 0]
    q = torch.tensor(charges)[kinds]
    nodes = 4 * torch.arange(count)[:, None] + torch.arange(4)
    apart = torch.nn.functional.normalize(torch.randn(count, 3), dim=1) * (4 + 4 * torch.rand(count, 1))
    inner = 0.5 * torch.randn(count, 1, 3)
    pos = torch.cat([inner, -inner, apart[:, None] + inner, apart[:, None] - inner], 1)
    features = torch.nn.functional.one_hot(kinds, len(charges)).double().repeat_interleave(2, 1)
    force = -COULOMB * (q[:, :1] * q[:, 1:]) * apart / apart.norm(dim=1, keepdim=True) ** 3
    forces = torch.stack([force / 2, force / 2, -force / 2, -force / 2], 1)
    bonds = torch.cat([nodes[:, [0, 1]], nodes[:, [1, 0]], nodes[:, [2, 3]], nodes[:, [3, 2]]])
    graphs = {"pos": pos.flatten(0, 1), "batch": torch.arange(count).repeat_interleave(4), "cell": None,
              "pbc": None, "batch_size": count}  # fmt: skip
    return torch.arange(4 * count) % 2, features.flatten(0, 1), graphs, bonds.T, q.sum(1), forces.flatten(0, 1)


def fitted(*data, scalars):
    made = PredictedChargeInteraction(["A", "B"], width=0.8, scalars=scalars, cutoff=2.0)
    elements, features, graphs, edge_index, total_charge, labels = data
    none = torch.zeros(0)
    atoms = Atoms(elements, edge_index, none, total_charge)
    sample = Sample(atoms, graphs, labels, features, 0.0 * features, none, none, none)
    return made, fit_predicted_charges(made, [sample])


def test_start_finds_the_charges_of_fragments(caplog):
    """Cations, anions and neutral ones in one set; total charges and forces between fragments are explained."""
    caplog.set_level("INFO")
    data = pairs(60, [1.0, -1.0, 0.0, 2.0])
    made, explained = fitted(*data, scalars=4)
    assert explained > 0.98
    assert "explain" in caplog.text
    for kind, charge in enumerate([1.0, -1.0, 0.0, 2.0]):
        q = made.constants[:, 0].sum() + 2 * made.linear.weight[0, kind] / made.feature_size[kind]
        assert abs(0.1 * q - charge) < 0.15


def test_start_from_forces_of_neutral_pairs():
    """Total charges say nothing there, forces do, up to one sign of all charges."""
    data = pairs(60, [1.0, -1.0], neutral=True)
    elements, features = data[0], data[1]
    _, explained = fitted(features[:, 0].long(), features, *data[2:], scalars=2)
    assert explained > 0.95
    silent = [*data[2:4], torch.zeros(60), torch.zeros(240, 3)]
    assert fitted(elements, features, *silent, scalars=2)[1] is None


def test_start_without_separate_fragments(caplog):
    caplog.set_level("INFO")
    elements, features, graphs, _, total, forces = pairs(5, [1.0, 0.0])
    nodes = torch.arange(20)
    first = torch.cat([nodes[:-1], nodes[1:]])
    whole = torch.stack([first, torch.cat([nodes[1:], nodes[:-1]])])
    graphs |= {"batch": torch.zeros(20, dtype=torch.int64), "batch_size": 1}
    _, explained = fitted(elements, features, graphs, whole, total.sum()[None], forces, scalars=2)
    assert explained is None
    assert "no graph has two separate fragments" in caplog.text
