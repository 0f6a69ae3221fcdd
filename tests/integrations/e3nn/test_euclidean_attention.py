"""Euclidean fast attention on irreps: e3nn's checker, the core's numbers, what is refused."""

import copy
import math
import pickle

import pytest
import torch
from e3nn import o3
from e3nn.util import jit
from euclidean import cloud
from space import batch_of, error
from tg_equiattn.integrations.e3nn import EuclideanFastAttention

from tg_equiattn import nn
from tg_equiattn.encodings import solid_harmonics

SIZES, WIDTH = (7, 1, 11), 3.0
INSIDE, OUTSIDE = "3x0o+2x1e+4x0e+3x1o+1x0e+1x2e", "2x1o+3x0e+1x1e+1x0o+2x2o+1x3o"
IRREPS = {
    "all": (INSIDE, OUTSIDE, {"lmax": 2}),
    "queries of vectors": (INSIDE, INSIDE, {"qk_lmax": 2, "qk_channels": 4, "heads": 2}),
    "scalars": ("5x0e", "3x0e+2x1o", {}),
    "odd scalars": ("3x0o", "2x0o+1x1e", {}),
    "vectors": ("3x1o", "2x0e+1x1e+2x1o+1x2e", {"learn_frequencies": True}),
    "high": ("2x3e+1x4o", "2x3e+1x2o", {"lmax": 2, "reduce": "mean"}),
}


@pytest.fixture
def make(randomise):
    def make(name="all", method="pairs", **options):
        inside, outside, more = IRREPS[name]
        return randomise(
            EuclideanFastAttention(inside, outside, max_radius=WIDTH, method=method, **{**more, **options})
        )

    return make


def graph(module, sizes=SIZES):
    pos = torch.cat([cloud(n, WIDTH) for n in sizes]).to(torch.get_default_dtype())
    return {"x": module.irreps_in.randn(sum(sizes), -1), "pos": pos, "batch": batch_of(sizes)}


@pytest.mark.parametrize("name", IRREPS)
@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_equivariance(name, method, default_dtype, make, check_equivariant):
    module = make(name, method, error=1e-11) if default_dtype == torch.float64 else make(name, method)
    x, pos, batch = graph(module).values()
    arguments = [module.irreps_in, "cartesian_points", module.irreps_out]
    check_equivariant(lambda x, pos: module(x, pos, batch), [x, pos], arguments[:2], arguments[2])


def test_directions_to_the_promised_error(double, make):
    """As promised, no better: a tighter promise takes more of them."""
    for name in IRREPS:
        for promised in (1e-3, 1e-6):
            pairs, directions = make(name), make(name, "directions", error=promised)
            directions.load_state_dict(pairs.state_dict())
            x = graph(pairs, (70,))
            assert error(directions(**x), pairs(**x)) <= 10 * promised
    coarse, fine = (make(method="directions", error=e).attention.directions for e in (1e-3, 1e-6))
    assert len(coarse) < len(fine)


def test_scalars_and_vectors_are_the_cores(double, randomise):
    core = randomise(nn.EuclideanFastAttention(3, 2, max_radius=WIDTH, lmax=2, qk_lmax=1, heads=2)).double()
    module = EuclideanFastAttention("3x0e+2x1o", "3x0e+2x1o", max_radius=WIDTH, lmax=2, qk_lmax=1, heads=2)
    module.attention.load_state_dict(core.module.attention.state_dict())
    ours, theirs = core.module.attention.product, module.attention.product
    signs = [
        (getattr(ours, f"coupling_{n}") * getattr(theirs, f"coupling_{n}")).sum().sign() for n in range(len(ours.paths))
    ]
    with torch.no_grad():  # a product is unique up to its sign
        for sign, weight in zip(signs, theirs.weights, strict=True):
            weight *= sign
    x = graph(module)
    scalars, vectors = core(x["x"][:, :3], x["x"][:, 3:].unflatten(1, (2, 3)), pos=x["pos"], batch=x["batch"])
    assert error(module(**x), torch.cat([scalars, vectors.flatten(1)], 1)) < 1e-12


def test_harmonics_are_e3nns(double):
    x = torch.randn(11, 3)
    wanted = o3.spherical_harmonics(list(range(9)), x, normalize=False, normalization="component")
    torch.testing.assert_close(solid_harmonics(x, 8), wanted, rtol=1e-9, atol=1e-9)


def test_ragged_equals_alone_and_bounded(double, make, equal):
    for method in ("pairs", "directions", "auto"):
        module = make(method=method)
        x = graph(module, (5, 70, 1, 33))
        out = module(**x)
        alone = [module(x["x"][x["batch"] == b], x["pos"][x["batch"] == b]) for b in range(4)]
        equal(out, torch.cat(alone))
        equal(module(**x, batch_size=4, max_num_nodes=71), out, 1e-7 if method == "auto" else 1e-12)
    assert module(x["x"][:0], x["pos"][:0]).shape == (0, module.irreps_out.dim)


def test_copies_printing_and_refusals(make):
    module = make()
    x = graph(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(**x), module(**x))
    assert repr(module).startswith(f"EuclideanFastAttention({o3.Irreps(INSIDE)} -> {o3.Irreps(OUTSIDE)} |")
    with pytest.raises(NotImplementedError, match="EuclideanFastAttention does not support TorchScript"):
        jit.compile(module)
    module.reset_parameters()


@pytest.mark.parametrize(
    ("message", "irreps", "options"),
    [
        ("irreps_in must have at least one irrep", ("", "1x0e"), {}),
        ("irreps_out must have at least one irrep", ("1x0e", "0x1o"), {}),
        ("irreps_out must be reachable .* lmax=1, got 2 channels", ("1x0e", "2x2e"), {}),
        ("irreps_out must be reachable", ("2x0e", "1x0o"), {"lmax": 2}),
        ("qk_channels must be even", ("1x0e", "1x0e"), {"qk_channels": 5}),
        ("error must be at least", ("1x0e", "1x0e"), {"max_frequency": 30 * math.pi}),
    ],
)
def test_bad_options(message, irreps, options):
    with pytest.raises(ValueError, match=message):
        EuclideanFastAttention(*irreps, **{"max_radius": 1.0, **options})


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"x must have shape \(nodes, 28\)", {"x": torch.ones(19, 5)}),
        ("pos must be given", {"pos": None}),
        (r"pos must have shape \(19, 3\)", {"pos": torch.ones(7, 3)}),
        ("batch must be sorted", {"batch": batch_of(SIZES).flip(0)}),
        ("x must be torch.float32", {"x": torch.ones(19, 28).double()}),
    ],
)
def test_bad_inputs(message, arguments, make):
    module = make()
    with pytest.raises(ValueError, match=message):
        module(**graph(module) | arguments)
