"""Charges on irreps: the layer of the core on the scalars among the features."""

import pytest
import torch
from e3nn import o3
from tg_equiattn.integrations.e3nn import IrrepsChargeInteraction

from tg_equiattn.nn import ChargeInteraction

IRREPS = "2x1o+3x0e+1x0o+2x0e+1x2e"
OPTIONS = {"charges": {"Na": 0.7, "Cl": -0.7}, "width": 1.0, "cutoff": 3.0}


def layer():
    made = IrrepsChargeInteraction(irreps_in=IRREPS, **OPTIONS)
    torch.nn.init.normal_(made.weights)
    return made


def inputs():
    pos, edge_index = 3 * torch.rand(6, 3), torch.tensor([[0, 1, 2, 5], [1, 0, 5, 2]])
    return torch.tensor([0, 1] * 3), pos, torch.randn(6, o3.Irreps(IRREPS).dim), edge_index


def call(made, elements, pos, features, edge_index):
    vectors = pos[edge_index[1]] - pos[edge_index[0]]
    return made(elements, pos, features=features, edge_index=edge_index, edge_vectors=vectors)


def test_it_is_the_core_on_scalars(double):
    made, (elements, pos, features, edge_index) = layer(), inputs()
    core = ChargeInteraction(**OPTIONS, scalars=5)
    core.weights = made.weights
    found = call(made, elements, pos, features, edge_index)
    wanted = call(core, elements, pos, features[:, [6, 7, 8, 10, 11]], edge_index)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_features_without_scalars_are_refused():
    with pytest.raises(ValueError, match="irreps_in must have scalars 0e, which give transfers, got 2x1o"):
        IrrepsChargeInteraction(irreps_in="2x1o", **OPTIONS)
    made, (elements, pos, features, edge_index) = layer(), inputs()
    with pytest.raises(ValueError, match=r"features must have shape \(nodes, 17\)"):
        call(made, elements, pos, features[:, :5], edge_index)
