"""Where heads look at the start, and the content-free scores of offsets and group elements."""

import torch

from tg_equiattn.grids import Window
from tg_equiattn.group.encodings import Locality, no_weight_decay, starting_offsets


def test_starts_written_down():
    """3 x 3 with four elements: the pixel itself, its neighbors, the corners; elements in turn."""
    cross, corners = [(-1, 0), (0, -1), (0, 1), (1, 0)], [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    places = starting_offsets(40, Window(2, 3), 4)
    assert places[:9] == [(x, n % 4, 0) for n, x in enumerate([(0, 0), *cross, *corners])]
    assert places[9:11] == [((0, 0), 1, 0), ((-1, 0), 2, 0)]
    assert places[36:38] == [((0, 0), 0, 1), ((-1, 0), 1, 1)]  # 36 pairs are taken: a second round
    assert starting_offsets(11, Window(2, 3))[9:] == [((0, 0), 0, 1), ((-1, 0), 0, 1)]


def test_sharpness_leaves_zero():
    """A start without locality_strength is not a dead end, and no step leads below zero."""
    module = Locality(2, Window(2, 3), 0.0)
    module(torch.ones(1, 1, 2))[0].sum().backward()
    assert bool((module.locality_strength.grad != 0).all())
    with torch.no_grad():
        module.locality_strength.fill_(-2.0)
    assert bool((module(torch.ones(1, 9, 2))[0] <= 0).all())


def test_names_without_weight_decay():
    """The parameters of places alone, by their names in a model; where they decay, heads lose their offsets."""
    layers = [Locality(9, Window(2, 3), 4.0, elements=4), torch.nn.Linear(2, 2)]
    names = no_weight_decay(torch.nn.Sequential(*layers))
    assert names == {"0.locality_strength", "0.centre", "0.preference"}
    assert no_weight_decay(layers[0]) == {name.removeprefix("0.") for name in names}
    assert no_weight_decay(layers[1]) == set()
