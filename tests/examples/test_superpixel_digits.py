"""Digits as graphs of superpixels, and the study of what moves and turns do to their classifiers."""

import dataclasses

import pytest
import torch
from torch_geometric.data import Batch


@pytest.fixture(scope="module")
def parts():
    from data.superpixel_digits import graphs

    return graphs(None, 75, 8, 9, 6, False)


EXACT = ["no attention", "Performer, lengths", "ours", "ours, far offsets", "ours, far part off", "ours, lengths"]


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact(parts, name):
    """Without positions among the inputs nothing sees moves, nor, of lengths alone, turns."""
    from superpixel_digits import PRESETS, build, moved, turned

    data = Batch.from_data_list(parts[0])
    data = data.apply(lambda x: x.double() if x.is_floating_point() else x)
    model = build(dataclasses.replace(PRESETS["quick"], models=(name,))).double()
    with torch.no_grad():
        model(data)  # batch norm
        out, there = model.eval()(data), model(moved(data, 16))
        turn = model(turned(data, 180 * torch.rand(9).double()))
    assert (there - out).abs().max() < 1e-10 * out.abs().max()
    change = (turn - out).abs().max() / out.abs().max()
    assert change < 1e-10 if "lengths" in name else change > 1e-6
