import pytest
import torch
from torch import nn

from tg_equiattn.groups import cyclic, dihedral
from tg_equiattn.testing import act, equivariance_error


def test_act_is_an_action():
    group = dihedral(4)
    x = torch.randn(2, 3, 8, 4, 5)
    for g in range(8):
        for h in range(8):
            assert torch.equal(act(act(x, group, h), group, g), act(x, group, int(group.cayley[g, h])))


def test_error_of_known_modules():
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    group = dihedral(4)
    assert equivariance_error(nn.ReLU(), group, x) == 0
    assert equivariance_error(lambda x: x.mean((2, 3)), group, x) < 1e-15
    assert equivariance_error(nn.Conv2d(3, 3, 3, padding=1).double(), group, x) > 0.1
    assert equivariance_error(lambda x: x + torch.linspace(0, 1, 6), group, x) > 0.1


def test_other_layouts():
    """Users' own layouts: channels last."""

    def last(x, group, element):
        return act(x.movedim(-1, 1), group, element).movedim(1, -1)

    x = torch.randn(2, 5, 4, 3)
    assert equivariance_error(nn.Tanh(), cyclic(4), x, input_action=last, output_action=last) == 0
    assert equivariance_error(nn.Softmax(dim=1), cyclic(4), x, input_action=last, output_action=last) > 0.1


def test_bad_input():
    group = cyclic(8)
    with pytest.raises(ValueError, match="element must be a lattice element"):
        act(torch.zeros(1, 1, 3, 3), group, 1)
    with pytest.raises(ValueError, match=r"\|H\|=8 on axis 2, got 4"):
        act(torch.zeros(1, 1, 4, 3, 3), group, 2)
    with pytest.raises(ValueError, match="x must have 4 axes"):
        act(torch.zeros(1, 1, 3), group, 2)
    with pytest.raises(ValueError, match="elements must name at least one"):
        equivariance_error(nn.ReLU(), group, torch.zeros(1, 1, 3, 3), elements=[])
    with pytest.raises(ValueError, match="finite outputs"):
        equivariance_error(lambda x: x / 0, group, torch.zeros(1, 1, 3, 3))
    x = torch.randn(1, 1, 3, 3)
    with pytest.raises(ValueError, match="finite outputs"):
        equivariance_error(lambda y: y if torch.equal(x, y) else y / 0, cyclic(4), x)
    with pytest.raises(ValueError, match="must keep shapes"):
        equivariance_error(lambda y: y if torch.equal(x, y) else y[:, :, :1], cyclic(4), x)
    with pytest.raises(ValueError, match="zeros alone"):
        equivariance_error(lambda y: 0 * y, cyclic(4), x)
    with pytest.raises(ValueError, match="lattice elements besides the identity"):
        equivariance_error(lambda y: y * torch.arange(3), cyclic(3), x)
