"""Indices of relations, encodings off the lattice, and where heads look at the start."""

import itertools

import pytest
import torch
from group_layers import GROUPS
from oracles import relation_argument

from tg_equiattn.grids import Window
from tg_equiattn.group.encodings import (
    ENCODINGS,
    INDEXED,
    GroupEncoding,
    Locality,
    no_weight_decay,
    relation_index,
    starting_offsets,
)
from tg_equiattn.groups import cyclic


@pytest.mark.parametrize("relation", INDEXED)
@pytest.mark.parametrize("name", ["C4", "D4", "D2", "mirror"])
def test_relation_index(name, relation):
    group = GROUPS[name]
    index = relation_index(group, relation)
    for h, t, s in itertools.product(range(len(group)), repeat=3):
        expected = relation_argument(group.matrices, relation, h, t, s)
        assert (index[t, s] if relation == "relative" else index[h, t, s]) == expected


@pytest.mark.parametrize("encoding", list(ENCODINGS))
@pytest.mark.parametrize("n", [3, 6, 8])
def test_off_lattice_elements(n, encoding, randomise):
    """rho((gh)^-1 g D) = rho(h^-1 D) for rotations that no pixel grid has, on continuous offsets."""
    group = cyclic(n)
    module = randomise(GroupEncoding(encoding, 2, 7, n)).double()
    offsets = torch.randn(11, 2, dtype=torch.float64)

    def encode(points):
        return module(torch.einsum("hyx,ny->hnx", group.matrices, points))[0]

    expected = encode(offsets)
    for g in range(n):
        moved = encode(offsets @ group.matrices[g].T)[group.cayley[g]]
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-10)
        if g != group.identity:  # negative control: without relabelling the elements it must fail
            assert (encode(offsets @ group.matrices[g].T) - expected).abs().max() > 1e-2


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
