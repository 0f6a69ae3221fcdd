"""Finite groups by their matrices, offsets of windows, and how group elements move grids."""

import math

import pytest
import torch
from oracles import positions

from tg_equiattn.grids import Window, transform_grid
from tg_equiattn.groups import FiniteGroup, cyclic, dihedral, from_generators, icosahedral, mirror, octahedral, trivial

QUARTER = [[0.0, -1.0], [1.0, 0.0]]
ORDERS = [
    (trivial(2), 1), (trivial(3), 1), (mirror(), 2), (mirror(3), 2), (cyclic(3), 3), (cyclic(12), 12),
    (dihedral(1), 2), (dihedral(4), 8), (dihedral(7), 14), (octahedral(), 24), (octahedral(reflections=True), 48),
    (icosahedral(), 60), (from_generators([QUARTER]), 4), (from_generators([QUARTER, [[-1.0, 0.0], [0.0, 1.0]]]), 8),
]  # fmt: skip


@pytest.mark.parametrize(("group", "order"), ORDERS, ids=[repr(g) for g, _ in ORDERS])
def test_table_multiplies_matrices(group, order):
    m = group.matrices
    assert len(group) == order
    torch.testing.assert_close(m[group.cayley], m[:, None] @ m[None], rtol=0, atol=1e-12)
    torch.testing.assert_close(m[group.inverse], m.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(m[group.identity], torch.eye(group.dim, dtype=torch.float64))


@pytest.mark.parametrize(
    ("group", "count"), [(cyclic(8), 4), (dihedral(8), 8), (octahedral(), 24), (icosahedral(), 12)]
)
def test_lattice_elements_are_exact(group, count):
    exact = group.matrices[group.lattice]
    assert len(exact) == count
    assert torch.equal(exact, exact.round())
    assert not bool((exact.signbit() & (exact == 0)).any())


def test_single_precision_matrices_are_snapped():
    angles = torch.arange(4) * (math.pi / 2)
    rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    group = FiniteGroup(rows.float().view(4, 2, 2))
    assert bool(group.lattice.all())
    assert group == cyclic(4)


def test_default_device_does_not_matter():
    with torch.device("meta"):
        group = dihedral(4)
        assert len(from_generators(group.matrices)) == 8
    assert group == dihedral(4)
    assert group.cayley.device.type == "cpu"


@pytest.mark.parametrize(("dim", "size"), [(2, 5), (3, 3)])
def test_window_offsets_follow_unfold(dim, size):
    """The n-th offset is the position of the n-th pixel of an unfolded window, relative to its centre."""
    place = positions([size] * dim)
    centre = place[len(place) // 2]
    assert torch.equal(Window(dim, size).offsets().double(), place - centre)


@pytest.mark.parametrize("spatial", [(3, 4), (2, 3, 2)])
def test_global_offsets_hold_every_pair_once(spatial):
    offsets = Window(len(spatial), None).offsets(spatial)
    place = positions(spatial)
    pairs = (place[None] - place[:, None]).flatten(0, 1).long()
    assert {tuple(o) for o in pairs.tolist()} == {tuple(o) for o in offsets.tolist()}
    assert len(offsets) == len({tuple(o) for o in offsets.tolist()})


def test_disk():
    disk = Window(2, 5, "disk")
    offsets = disk.offsets()
    assert len(offsets) == 21
    assert bool((offsets.double().norm(dim=1) <= 2.5).all())
    assert torch.equal(Window(2, 5).offsets()[list(disk.selection)], offsets)
    assert len(Window(2, 3, "disk").offsets()) == 9  # the corners are 1.41 pixels away


@pytest.mark.parametrize("spatial", [(3, 5), (1, 4), (2, 3, 4)])
def test_transform_moves_positions(spatial):
    """Value at x of the transformed image is the value at g^-1 x of the image, about the centre."""
    x = torch.randn(spatial)
    group = dihedral(4) if len(spatial) == 2 else octahedral(reflections=True)
    centred = positions(spatial) - positions(spatial).mean(0)
    for matrix in group.matrices:
        moved = transform_grid(x, matrix)
        place = positions(moved.shape)
        source = (place - place.mean(0)) @ matrix  # g^-1 is the transpose
        nearest = torch.cdist(source, centred).argmin(1)
        assert torch.equal(moved.flatten(), x.flatten()[nearest])


def test_quarter_turn_is_counter_clockwise():
    image = torch.tensor([[1, 2], [3, 4]])
    assert transform_grid(image, cyclic(4).matrices[1]).tolist() == [[2, 4], [1, 3]]
