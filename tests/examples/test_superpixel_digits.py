"""Digits as graphs of superpixels, and the study of what moves and turns do to their classifiers."""

import dataclasses

import pytest
import torch
from torch_geometric.data import Batch


@pytest.fixture(scope="module")
def parts():
    from data.superpixel_digits import graphs

    return graphs(None, 75, 8, 9, 6, False)


def test_moves_and_turns(parts):
    """Graphs stay the same graphs, and images go where their graphs go."""
    from superpixel_digits import CENTRE, moved, turned

    data = Batch.from_data_list(parts[0])
    there = moved(data, 3)
    steps = there.pos - data.pos
    wanted = torch.tensor([[3.0, 0], [-3.0, 0], [0, 3.0], [0, -3.0]])
    torch.testing.assert_close(steps, wanted[data.batch % 4])
    turn = turned(data, torch.full((9,), 90.0))
    x, y = (data.pos - CENTRE).T
    torch.testing.assert_close(turn.pos - CENTRE, torch.stack([-y, x], 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(turn.pixels, torch.rot90(data.pixels, 1, (1, 2)), rtol=0, atol=1e-4)
    assert there.edge_index is turn.edge_index is data.edge_index
    for number, (right, up) in enumerate(((3, 0), (-3, 0), (0, 3), (0, -3))):
        middle = there.pixels[number, 3:-3, 3:-3]  # the border was made wider
        torch.testing.assert_close(middle, data.pixels[number].roll((-up, right), (0, 1)), rtol=0, atol=0)


EXACT = ["no attention", "Performer, lengths", "ours", "ours, far offsets", "ours, far part off", "ours, lengths"]


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact(parts, name):
    """Without positions among the inputs nothing sees moves, nor, of lengths alone, turns."""
    from superpixel_digits import PRESETS, build, moved, turned

    torch.manual_seed(0)
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
