import warnings

import pytest
import torch
from torch import nn

from tg_equiattn.groups import cyclic, dihedral, dyadic
from tg_equiattn.nn import GroupAttention
from tg_equiattn.testing import act, dilation_errors, equivariance_error, off_lattice_errors


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


class HiddenTerm(nn.Module):
    """A position encoding that starts at zero hides that the module is not equivariant."""

    def __init__(self):
        super().__init__()
        self.places, self.bias = nn.Parameter(torch.zeros(3, 1, 5, 5)), nn.Parameter(torch.zeros(3, 1, 1, 1))

    def forward(self, x):
        return x + self.places + self.bias


@pytest.mark.parametrize("check", [equivariance_error, off_lattice_errors, dilation_errors])
def test_parameters_that_hide_a_term_are_named(check):
    module = HiddenTerm()
    group = {equivariance_error: cyclic(4), off_lattice_errors: cyclic(8), dilation_errors: dyadic(2)}[check]
    x = (2, 3, 8, 5, 5) if check is off_lattice_errors else torch.randn(2, 3, len(group), 5, 5)
    if check is dilation_errors:
        module.places = nn.Parameter(torch.zeros(3, 1, 1, 1))
    with pytest.warns(UserWarning, match=r"does not see .*: places\. Give all parameters random"):
        check(module, group, x)
    for p in module.parameters():
        nn.init.normal_(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        error = check(module, group, x)
        assert check is not equivariance_error or error > 0.1
        equivariance_error(nn.BatchNorm2d(3).eval(), cyclic(4), torch.randn(2, 3, 5, 5))  # zero biases hide nothing


def test_a_preference_of_elements_that_starts_at_zero():
    layer, x = GroupAttention(cyclic(4), 3, 4, relation="lifted"), torch.randn(1, 3, 4, 5, 5)
    with pytest.warns(UserWarning, match=r"locality\.preference"):
        assert equivariance_error(layer, cyclic(4), x) < 1e-5
    nn.init.normal_(layer.locality.preference)
    assert equivariance_error(layer, cyclic(4), x) < 1e-5
