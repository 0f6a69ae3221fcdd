"""Group-linear maps in the Fourier basis: the form with blocks is the form with one matrix."""

import copy
import math

import pytest
import torch
from group_layers import GROUPS
from torch import nn

from tg_equiattn.group.fourier import fourier_basis, irreps
from tg_equiattn.group.layers import TRANSFORM
from tg_equiattn.groups import FiniteGroup, cyclic, dihedral, icosahedral, octahedral, trivial
from tg_equiattn.nn import GroupLinear
from tg_equiattn.testing import equivariance_error

FULL = icosahedral().matrices
EVERY = {
    **GROUPS, "C3": cyclic(3), "C5": cyclic(5), "D3": dihedral(3), "D6": dihedral(6), "trivial in 3-D": trivial(3),
    "cube with reflections": octahedral(True), "icosahedral": icosahedral(),
    "icosahedral with reflections": FiniteGroup(torch.cat([FULL, -FULL])),
}  # fmt: skip


def both(group, channels=3, out_channels=5, **options):
    """The same layer in both forms."""
    layer = GroupLinear(group, channels, out_channels, **options).double()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    other = copy.deepcopy(layer)
    layer.saving, other.saving = 0.0, math.inf
    return layer, other


@pytest.mark.parametrize("name", EVERY)
def test_basis(name):
    """It is orthogonal, the trivial irrep is first, and dimensions and multiplicities fit."""
    group = EVERY[name]
    basis, kinds = fourier_basis(group)[0], irreps(group)
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(group), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(basis[:, 0], torch.full((len(group),), len(group) ** -0.5, dtype=torch.float64))
    assert sum(dim * copies for dim, copies in kinds) == len(group)
    assert all(copies in (dim, dim / 2) for dim, copies in kinds)  # of real and of complex type


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (cyclic(4), [(1, 1), (1, 1), (2, 1)]),
        (dihedral(4), [(1, 1)] * 4 + [(2, 2)]),
        (octahedral(), [(1, 1), (1, 1), (2, 2), (3, 3), (3, 3)]),
        (icosahedral(), [(1, 1), (3, 3), (3, 3), (4, 4), (5, 5)]),
    ],
)
def test_irreps_of_known_groups(group, expected):
    assert list(irreps(group)) == expected


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("spatial", [(), (3, 2)])
def test_both_forms_are_equal(name, spatial):
    """Outputs, gradients, and second derivatives, with a scale of inputs and biases, too."""
    group = EVERY[name]
    dense, blocks = both(group)
    x = torch.randn(2, 3, len(group), *spatial, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(2, 5, len(group), *spatial, dtype=torch.float64)
    found = []
    for layer in (dense, blocks):
        inputs = x, layer.weight, layer.bias
        out = layer(x, 0.7)
        assert out.is_contiguous()
        first = torch.autograd.grad((out.tanh() * probe).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append((out, *first, *second))
    for one, other in zip(*([x.detach() for x in each] for each in found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(one.abs().max() + 1))


@pytest.mark.slow
def test_transforms_and_other_calls():
    """Without a bias, for no images and no pixels, under vmap and forward mode, and in a compiled graph."""
    dense, blocks = both(dihedral(4), bias=False)
    for shape in ((2, 3, 8, 0), (0, 3, 8, 4), (2, 3, 8)):
        assert blocks(torch.randn(*shape, dtype=torch.float64)).shape == (shape[0], 5, *shape[2:])
    x, tangent = torch.randn(2, 4, 2, 3, 8, 5, dtype=torch.float64)
    for layer in (dense, blocks):
        expected = torch.stack([layer(y) for y in x])
        torch.testing.assert_close(torch.vmap(layer)(x), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.func.jvp(layer, (x[0],), (tangent[0],))[1], layer(tangent[0]))
    compiled = torch.compile(blocks, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x[0]), dense(x[0]), rtol=0, atol=1e-12)


def test_weights_of_a_few_and_of_many_channels_load_in_both_forms():
    """Parameters do not depend on the form, which many channels have by default."""
    group = dihedral(4)
    few, many = GroupLinear(group, 8, 8), GroupLinear(group, 64, 64)
    assert few.saving < TRANSFORM < many.saving
    assert GroupLinear(trivial(), 512, 512).saving == 0
    dense, blocks = both(group, 3, 5)
    assert [*dense.state_dict()] == [*blocks.state_dict()] == ["weight", "bias", "_extra_state"]
    dense.load_state_dict(blocks.state_dict())
    x = torch.randn(2, 64, 8, 4, 4)
    torch.testing.assert_close(many(x), as_one_matrix(many)(x), rtol=1e-5, atol=1e-5)
    assert equivariance_error(many.double(), group, x.double()) < 1e-13


def as_one_matrix(layer):
    """A copy of a layer in the form with one matrix."""
    other = copy.deepcopy(layer)
    other.saving = 0.0
    return other


def test_coefficients_and_gain():
    """A map of Fourier coefficients, with a gain of channels, is the map between both transforms."""
    group = octahedral()
    layer, _ = both(group)
    basis, gain = fourier_basis(group)[0], torch.randn(3, dtype=torch.float64)
    x = torch.randn(7, 3, 24, dtype=torch.float64)
    rows = (basis.T @ x.transpose(1, 2)).flatten(1)
    coordinates = layer.to_coordinates(rows, gain)
    found = (basis @ coordinates.flatten(1)).view(24, 7, 5).permute(1, 2, 0)
    torch.testing.assert_close(found, layer(gain[:, None] * x), rtol=0, atol=1e-12)
    back, _ = both(group, 5, 3)
    found = (basis @ back.to_rows(coordinates).unflatten(1, (24, 3))).transpose(1, 2)
    torch.testing.assert_close(found, back(layer(gain[:, None] * x)), rtol=0, atol=1e-12)


def test_half_precision():
    """Under autocast, outputs are near those in float32."""
    layer, x = GroupLinear(dihedral(4), 64, 64), torch.randn(2, 64, 8, 4, 4)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), expected, rtol=0.05, atol=0.1)
