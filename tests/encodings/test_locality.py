"""Where heads look at the start, and the content-free scores of offsets and group elements."""

import math

import pytest
import torch

from tg_equiattn.encodings.locality import Locality, starting_offsets
from tg_equiattn.grids import Window

WINDOWS = [Window(2, 3), Window(2, 5), Window(2, 7), Window(2, 5, "disk"),
           Window(2, None), Window(3, 3), Window(3, None), Window(2, 1)]  # fmt: skip


@pytest.mark.parametrize("elements", [1, 4, 9])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_no_two_heads_start_alike(window, elements):
    places = starting_offsets(100, window, elements)
    assert len(set(places)) == 100
    for number in {turn for _, _, turn in places[:-1]}:  # within a round every pair of a place and an element, once
        pairs = [place[:2] for place in places if place[2] == number]
        assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_nearest_places_come_first(window):
    """Each offset once, in the order of length, before any is taken again; none outside of the window."""
    count = 60 if window.is_global else window.count()
    offsets = [offset for offset, *_ in starting_offsets(count, window, 4)]
    inside = (window.offsets([9] * window.dim) if window.is_global else window.offsets()).tolist()
    lengths = sorted(math.hypot(*offset) for offset in inside)
    assert [math.hypot(*offset) for offset in offsets] == lengths[:count]
    assert len(set(offsets)) == count
    assert {tuple(offset) for offset in inside} >= set(offsets)


def test_starts_written_down():
    """3 x 3 with four elements: the pixel itself, its neighbors, the corners; elements in turn."""
    cross, corners = [(-1, 0), (0, -1), (0, 1), (1, 0)], [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    places = starting_offsets(40, Window(2, 3), 4)
    assert places[:9] == [(x, n % 4, 0) for n, x in enumerate([(0, 0), *cross, *corners])]
    assert places[9:11] == [((0, 0), 1, 0), ((-1, 0), 2, 0)]
    assert places[36:38] == [((0, 0), 0, 1), ((-1, 0), 1, 1)]  # 36 pairs are taken: a second round
    assert starting_offsets(11, Window(2, 3))[9:] == [((0, 0), 0, 1), ((-1, 0), 0, 1)]


def test_starts_as_its_places_say():
    window = Window(2, 3)
    module = Locality(40, window, 4.0, elements=4, element_preference=True)
    for head, (offset, element, turn) in enumerate(starting_offsets(40, window, 4)):
        assert module.centre[head].tolist() == list(offset)
        assert module.locality_strength[head].item() == 4.0 / 2**turn
        assert module.preference[head].argmax() == element
        assert module.preference[head].count_nonzero() == 1
    plain = Locality(40, window, 4.0, elements=4)
    assert not plain.preference.any()
    assert plain.locality_strength[9] == 2.0  # without preferences the tenth head begins the second round
    assert Locality(3, window, 4.0).preference is None


@pytest.mark.parametrize("elements", [None, 3])
def test_formula(elements, randomise):
    module = randomise(Locality(5, Window(2, 5), 1.5, elements=elements, element_preference=True)).double()
    offsets = torch.randn(4, 7, 2, dtype=torch.float64)
    space, group = module(offsets)
    assert bool((module.locality_strength < 0).any())  # its size counts
    square = (offsets[None] - module.centre[:, None, None]).square().sum(-1)
    torch.testing.assert_close(space, -module.locality_strength.abs()[:, None, None] * square, rtol=1e-12, atol=0)
    assert group is (None if elements is None else module.preference)
    inputs = list(module.parameters())
    assert torch.autograd.gradcheck(lambda *_: tuple(x for x in module(offsets) if x is not None), inputs)


def test_sharpness_leaves_zero():
    """A start without locality_strength is not a dead end, and no step leads below zero."""
    module = Locality(2, Window(2, 3), 0.0)
    module(torch.ones(1, 1, 2))[0].sum().backward()
    assert bool((module.locality_strength.grad != 0).all())
    with torch.no_grad():
        module.locality_strength.fill_(-2.0)
    assert bool((module(torch.ones(1, 9, 2))[0] <= 0).all())


def test_half_precision_is_finite():
    """64 pixels away at locality_strength 20 the score is beyond what float16 holds."""
    module = Locality(2, Window(2, None), 20.0).half()
    space, _ = module(torch.full((1, 1, 2), 64.0, dtype=torch.float64))
    assert space.dtype == torch.float32
    assert bool(space.isfinite().all())
