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
