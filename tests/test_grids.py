import pytest
import torch
from oracles import positions

from tg_equiattn.grids import Window, transform_grid
from tg_equiattn.groups import cyclic, dihedral, octahedral


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
