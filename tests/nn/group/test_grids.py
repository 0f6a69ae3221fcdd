"""Windows with a side for each axis."""

import pytest
import torch
from group_layers import LAYERS, image
from small_groups import GROUPS

from tg_equiattn.groups import dihedral, from_generators
from tg_equiattn.nn.group import attention_layer
from tg_equiattn.testing import act, equivariance_error

D2, D4 = dihedral(2), GROUPS["D4"]
ABOUT_Z = from_generators([[[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, -1]]])
KEPT = [(D2, (3, 5), (4, 6)), (D2, (5, 1), (3, 3)), (ABOUT_Z, (1, 3, 3), (2, 3, 4))]


def act_on_mask(mask, group, element):
    return act(mask[:, None].double(), group, element)[:, 0] > 0.5


@pytest.mark.parametrize(("group", "sides", "spatial"), KEPT)
@pytest.mark.parametrize("name", ["lifting", "frame", "relative", "global"])
def test_a_side_for_each_axis(name, group, sides, spatial, randomise):
    layer = randomise(LAYERS[name](group, kernel_size=sides)).double()
    x, mask = image(group, spatial, name != "lifting"), torch.rand(2, *spatial) < 0.7
    for g in range(len(group)):
        for given, moved in ((None, None), (mask, act_on_mask(mask, group, g))):
            wanted = act(layer(x, given), group, g)
            torch.testing.assert_close(layer(act(x, group, g), moved), wanted, rtol=0, atol=1e-10)


def test_other_elements_do_not_keep_the_window(monkeypatch, randomise):
    """Without the refusal, rotations by 90 degrees would not be symmetries; those by 180 degrees would."""
    with pytest.raises(ValueError, match=r"kernel_size must have equal sides .* elements of D4"):
        LAYERS["frame"](D4, kernel_size=(3, 5))
    monkeypatch.setattr(attention_layer, "check_sides", lambda *_: None)
    layer, x = randomise(LAYERS["frame"](D4, kernel_size=(3, 5))).double(), image(D4, (5, 5), True)
    errors = [equivariance_error(layer, D4, x, elements=[g]) for g in range(len(D4))]
    exchanged = D4.matrices[:, 0, 1].abs() > 0.5
    assert all((error > 1e-3) == exchanged[g] for g, error in enumerate(errors))


def test_rotations_off_the_lattice_about_the_short_axis():
    """A cylinder about the axis of the slices has equal sides along the axes that they exchange."""
    half = 0.5**0.5
    eighth = from_generators([[[half, -half, 0], [half, half, 0], [0, 0, 1.0]]])
    layer = LAYERS["frame"](eighth, kernel_size=(3, 5, 5))
    assert layer.window.shape == "disk"
    assert equivariance_error(layer.double(), eighth, image(eighth, (2, 4, 4), True, batch=1), elements=[2, 4]) < 1e-10
    with pytest.raises(ValueError, match="equal sides"):
        LAYERS["frame"](eighth, kernel_size=(5, 5, 3))


def test_equal_sides_are_one_number():
    assert LAYERS["frame"](D4, kernel_size=[3, 3]).settings()["kernel_size"] == 3
    loaded = LAYERS["frame"](D2, kernel_size=(3, 5))
    loaded.load_state_dict(LAYERS["frame"](D2, kernel_size=[3, 5]).state_dict())
    with pytest.raises(ValueError, match="kernel_size"):
        loaded.load_state_dict(LAYERS["frame"](D2, kernel_size=(5, 3)).state_dict())
