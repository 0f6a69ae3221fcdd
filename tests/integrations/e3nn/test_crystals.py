"""Euclidean fast attention on irreps in crystals: e3nn's checker with cells, supercells, the core's numbers."""

import pytest
import torch
from e3nn import o3
from space import error
from tg_equiattn.integrations.e3nn import EuclideanFastAttention

from tg_equiattn import nn

CELL = [[2.5, 0.2, 0.1], [0.3, 3.0, -0.2], [-0.4, 0.5, 2.2]]
IRREPS = {
    "all": ("3x0o+2x1e+4x0e+3x1o+1x2e", "2x1o+3x0e+1x1e+1x0o+2x2o+1x3o", {"lmax": 2}),
    "queries of vectors": ("4x0e+3x1o", "4x0e+3x1o", {"qk_lmax": 1, "qk_channels": 4, "heads": 2}),
    "odd scalars": ("3x0o", "2x0o+1x1e", {"reduce": "mean"}),
}


@pytest.fixture
def make(randomise):
    def make(name="all", **options):
        inside, outside, more = IRREPS[name]
        options = {"max_radius": 3.0, "max_wavenumber": 4.0, **more, **options}
        return randomise(EuclideanFastAttention(inside, outside, **options))

    return make


@pytest.mark.parametrize("name", IRREPS)
def test_equivariance(name, default_dtype, make, check_equivariant):
    """The rows of cells turn along as vectors; open clouds are among the crystals."""
    module, cell = make(name), torch.tensor(CELL)
    batch = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)
    x, pos = module.irreps_in.randn(12, -1), torch.randn(12, 3)
    rows = torch.cat([cell, torch.zeros(3, 3), 1.5 * cell])

    def run(x, pos, rows):
        return module(x, pos, batch, cell=rows.view(3, 3, 3))

    check_equivariant(run, [x, pos, rows], [module.irreps_in, "cartesian_points", o3.Irreps("1o")], module.irreps_out)


def test_supercells(double, make):
    for name in IRREPS:
        module, cell = make(name), torch.tensor(CELL)
        x, pos = module.irreps_in.randn(4, -1), torch.randn(4, 3)
        shifts = torch.cartesian_prod(torch.arange(2.0), torch.arange(1.0), torch.arange(3.0)) @ cell
        large = (shifts[:, None] + pos).flatten(0, 1)
        out = module(x.repeat(6, 1), large, cell=torch.tensor([[2.0], [1], [3]]) * cell)
        assert error(out, module(x, pos, cell=cell).repeat(6, 1)) <= 1e-10
        assert error(module(x.repeat(6, 1), large), module(x, pos, cell=cell).repeat(6, 1)) > 1e-2  # without the cell


def test_equals_the_core(double, make):
    module = EuclideanFastAttention("5x0e+4x1o", "5x0e+4x1o", max_radius=3.0, max_wavenumber=4.0, heads=2)
    core = nn.EuclideanFastAttention(5, 4, max_radius=3.0, max_wavenumber=4.0, heads=2).double()
    core.module.attention.load_state_dict(module.attention.state_dict())
    cell, x, pos = torch.tensor(CELL), torch.randn(6, 17), torch.randn(6, 3)
    scalars, vectors = core(x[:, :5], vectors_of(x[:, 5:]), pos=pos, cell=cell)
    out = module(x, pos, cell=cell)
    assert error(out[:, :5], scalars) <= 1e-10
    assert error(vectors_of(out[:, 5:]), vectors) <= 1e-10


def vectors_of(x):
    return x.unflatten(1, (-1, 3))


def test_bad_arguments(make):
    module, x, pos = make("odd scalars"), torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"cell must be \(3, 3\) or one a graph, \(1, 3, 3\), got \(3,\)"):
        module(x, pos, cell=torch.ones(3))
    with pytest.raises(ValueError, match="slabs and wires"):
        module(x, pos, cell=torch.diag(torch.tensor([2.0, 2, 0])))
    with pytest.raises(ValueError, match="max_wavenumber must be given to the module for graphs with a cell"):
        make("odd scalars", max_wavenumber=None)(x, pos, cell=torch.eye(3))
