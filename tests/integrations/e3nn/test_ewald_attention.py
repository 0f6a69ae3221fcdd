"""Ewald attention on irreps: e3nn's checker, the core's numbers, distant nodes, what is refused."""

import pytest
import torch
from e3nn import o3
from space import batch_of, error, take_weights
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

from tg_equiattn import nn
from tg_equiattn.ewald.harmonics import solid_harmonics

SIZES = (7, 1, 11)
INSIDE, OUTSIDE = "3x0o+2x1e+4x0e+3x1o+1x0e+1x2e", "2x1o+3x0e+1x1e+1x0o+2x2o+1x3o"
IRREPS = {
    "all": (INSIDE, OUTSIDE, {"lmax": 2}),
    "heads": (INSIDE, INSIDE, {"heads": 2}),
    "scalars": ("5x0e", "3x0e+2x1o", {}),
    "odd scalars": ("3x0o", "2x0o+1x1e", {}),
    "vectors": ("3x1o", "2x0e+1x1e+2x1o+1x2e", {"num_gaussians": 3, "num_coulomb": 1}),
    "high": ("2x3e+1x4o", "2x3e+1x2o", {"lmax": 2}),
}


@pytest.fixture
def make(randomise):
    def make(name="all", **options):
        inside, outside, more = IRREPS[name]
        return randomise(
            IrrepsEwaldAttention(
                inside, outside, **{"width": 1.0, "num_gaussians": 2, "num_coulomb": 2, **more, **options}
            )
        )

    return make


def graph(module, sizes=SIZES):
    total = sum(sizes)
    return {"x": module.irreps_in.randn(total, -1), "pos": 2 * torch.randn(total, 3), "batch": batch_of(sizes)}


@pytest.mark.parametrize("name", IRREPS)
def test_equivariance(name, default_dtype, make, check_equivariant):
    module = make(name)
    x, pos, batch = graph(module).values()
    arguments = [module.irreps_in, "cartesian_points", module.irreps_out]
    check_equivariant(lambda x, pos: module(x, pos, batch), [x, pos], arguments[:2], arguments[2])


def test_rotations_of_distant_nodes_are_seen(double, randomise):
    """An invariant of one node changes as a distant node rotates, except with queries of scalars alone."""
    module = randomise(IrrepsEwaldAttention("2x0e+2x1o+1x2e", "3x0e", width=1.0, lmax=0))
    x, pos = module.irreps_in.randn(2, -1), torch.tensor([[0.0, 0, 0], [9.0, 0, 0]])
    turn = module.irreps_in.D_from_matrix(o3.rand_matrix())
    other = torch.stack([x[0], x[1] @ turn.T])
    assert error(module(other, pos)[0], module(x, pos)[0]) > 1e-3
    with torch.no_grad():
        for irrep, weight in zip(module.rows_in, module.query_key, strict=True):
            weight *= irrep.degree == 0
    assert error(module(other, pos)[0], module(x, pos)[0]) <= 1e-10


def test_scalars_and_vectors_are_the_cores(double, randomise):
    """Of a molecule, a crystal and a slab in one batch, too, for which the core's tests rotate cells."""
    options = {"width": 1.0, "lmax": 2, "heads": 2, "num_gaussians": 2, "num_coulomb": 2}
    core = randomise(nn.EwaldAttention(3, 2, **options)).double()
    module = IrrepsEwaldAttention("3x0e+2x1o", "3x0e+2x1o", **options)
    take_weights(module, core)
    ours, theirs = (layer.product.couplings(torch.device("cpu")) for layer in (core, module))
    with torch.no_grad():  # a product is unique up to its sign
        for one, other, weight in zip(ours, theirs, module.product.weights, strict=True):
            weight *= (one * other).sum().sign()
    x = graph(module)
    pbc = torch.tensor([[False] * 3, [True] * 3, [True, False, True]])
    for more in ({}, {"cell": 4 * torch.eye(3) + 0.5 * torch.randn(3, 3, 3), "pbc": pbc}):
        given = {"pos": x["pos"], "batch": x["batch"], **more}
        scalars, vectors = core(x["x"][:, :3], x["x"][:, 3:].unflatten(1, (2, 3)), **given)
        assert error(module(**x, **more), torch.cat([scalars, vectors.flatten(1)], 1)) < 1e-12


def test_harmonics_are_e3nns(double):
    x = torch.randn(11, 3)
    wanted = o3.spherical_harmonics(list(range(9)), x, normalize=False, normalization="component")
    torch.testing.assert_close(solid_harmonics(x, 8), wanted, rtol=1e-9, atol=1e-9)
