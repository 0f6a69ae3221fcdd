"""The layer of scalars and vectors: symmetries, forces, batches, options, precision."""

import math
import warnings

import pytest
import torch
from clouds import S, V, Whole, check_batch_equals_each_alone, close, dense, sample
from euclidean import cloud
from space import batch_of, error, motion, move

from tg_equiattn.nn import EuclideanFastAttention
from tg_equiattn.testing import TOLERANCE

KINDS = {
    "pairs": {"method": "pairs"},
    "directions": {"method": "directions"},
    "heads": {"method": "directions", "heads": 2, "learn_frequencies": True, "qk_lmax": 1, "error": 1e-9},
    "high degree": {"method": "pairs", "lmax": 3, "qk_channels": 2, "out_scalars": 5, "out_vectors": 1},
    "distances alone": {"method": "directions", "lmax": 0, "reduce": "mean"},
    "auto": {},
}
WIDTH = 3.0


@pytest.fixture
def make(randomise):
    """A layer with random parameters; frequencies stay within their bounds."""

    def make(name="auto", dtype=torch.float64, **options):
        layer = randomise(EuclideanFastAttention(S, V, **{"max_radius": WIDTH, **KINDS[name], **options})).to(dtype)
        with torch.no_grad():
            for key, p in layer.named_parameters():
                if "frequencies" in key:
                    p.uniform_(0, math.pi / WIDTH)
        return layer

    return make


def points(sizes=(70,), dtype=torch.float64):
    x = sample("plain", list(sizes), dtype)
    return x | {"pos": torch.cat([cloud(n, WIDTH) for n in sizes]).to(dtype)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", KINDS)
def test_symmetries(name, dtype, make):
    layer, x = make(name, dtype), points(dtype=dtype)
    out, exact = layer(**x), KINDS[name].get("method") == "pairs"
    for reflect in (False, True):
        r = motion(dtype, reflect)
        moved = layer(**x | {"vectors": move(x["vectors"], r), "pos": move(x["pos"], r)})
        assert error(moved, (out[0], move(out[1], r))) <= max(TOLERANCE[dtype], 0 if exact else 1e-6)
    shifted = layer(**x | {"pos": x["pos"] + torch.tensor([0.3, -2.0, 1.0], dtype=dtype)})
    assert error(shifted, out) <= 0.01 * TOLERANCE[dtype] if dtype == torch.float64 else TOLERANCE[dtype]
    order = torch.randperm(70)
    permuted = layer(**x | {key: x[key][order] for key in ("scalars", "vectors", "pos")})
    assert error(permuted, tuple(part[order] for part in out)) <= max(1e-12, 0.1 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["pairs", "directions"])
def test_what_breaks_the_symmetry_is_seen(name, make):
    """Negative controls: vectors that do not turn along, a space that is stretched."""
    layer, x, r = make(name), points(), motion()
    out = layer(**x)
    moved = layer(**x | {"pos": move(x["pos"], r)})
    assert error(moved, (out[0], move(out[1], r))) > 1e-2
    stretch = torch.tensor([1.0, 0.8, 0.9])
    out = layer(**x | {"pos": x["pos"] * stretch})
    moved = layer(**x | {"vectors": move(x["vectors"], r), "pos": move(x["pos"], r) * stretch})
    assert error(moved, (out[0], move(out[1], r))) > 1e-3


def test_directions_agree_with_pairs_forces_included(make):
    pairs, directions = make("pairs"), make("directions")
    directions.load_state_dict(pairs.state_dict())
    found = []
    for layer in (pairs, directions):
        x = points()
        torch.manual_seed(5)
        x = points()
        x["pos"].requires_grad_()
        scalars, vectors = layer(**x)
        energy = scalars.sin().sum() + vectors.square().sum()
        found.append((scalars, vectors, *torch.autograd.grad(energy, x["pos"])))
    assert error(found[1], found[0]) < 1e-5
    assert error(found[1][:2], found[0][:2]) < 1e-6


@pytest.mark.parametrize("name", ["pairs", "directions"])
def test_training_on_forces(name, make):
    """Gradients of forces with respect to every parameter, learned frequencies too, against finite differences."""
    layer, x = make(name, heads=2, learn_frequencies=True), points([9])

    def loss():
        pos = x["pos"].clone().requires_grad_()
        scalars, vectors = layer(**x | {"pos": pos})
        (force,) = torch.autograd.grad((scalars.sum() + vectors.square().sum()) / 100, pos, create_graph=True)
        return force.square().sum()

    grads = torch.autograd.grad(loss(), list(layer.parameters()))
    steps = [torch.randn_like(p) for p in layer.parameters()]
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, step in zip(layer.parameters(), steps, strict=True):
                p += sign * 1e-6 * step
        ends.append(float(loss().detach()))
    assert float(sum((g * s).sum() for g, s in zip(grads, steps, strict=True))) == pytest.approx(
        (ends[0] - ends[1]) / 2e-6, rel=1e-5
    )


@pytest.mark.parametrize("name", KINDS)
def test_ragged_equals_each_alone(name, make):
    sizes = [5, 1, 70, 9, 33]
    layer, x = make(name), points(sizes)
    check_batch_equals_each_alone(layer, x, sizes)
    out = layer(**x)
    padded, there = dense(x, sizes, 71, torch.nan)
    for got, wanted in zip(layer(**padded), out, strict=True):
        torch.testing.assert_close(got[there], wanted, rtol=0, atol=1e-7 if name == "auto" else 1e-10)
        assert not got[~there].any()
    broken = {**x, "pos": x["pos"].clone()}
    broken["pos"][2] = torch.nan
    others = x["batch"] != 0
    close([part[others] for part in layer(**broken)], [part[others] for part in out])


def test_sums_grow_and_means_do_not(make):
    """Where a cloud comes twice, at the same places."""
    x = points([20])
    twice = {key: torch.cat([x[key]] * 2) for key in ("scalars", "vectors", "pos")}
    for reduce, factor in (("sum", 2), ("mean", 1)):
        layer = make("pairs", reduce=reduce)
        out = layer(**x)
        assert error([part[:20] for part in layer(**twice)], [factor * part for part in out]) < 1e-12
    layer, divided = make("pairs"), make("pairs", num_nodes=16)
    divided.load_state_dict(layer.state_dict())
    close(divided(**x), [part / 16 for part in layer(**x)], 1e-12)


def test_new_layers_keep_their_scale():
    """Where num_nodes is as many as there are; sums do not."""
    scales = {}
    for count in (30, 3000):
        torch.manual_seed(0)
        x = points([count], dtype=torch.float32)
        for num_nodes in (None, count):
            torch.manual_seed(1)
            layer = EuclideanFastAttention(3, 2, max_radius=4.0, num_nodes=num_nodes)
            scales[count, num_nodes is None] = float(layer(**x)[0].detach().std())
    assert 1 / 3 < scales[3000, False] / scales[30, False] < 3
    assert scales[3000, True] / scales[30, True] > 50


def test_without_scalars_or_vectors(randomise):
    for scalars, vectors in ((0, 3), (3, 0)):
        layer = randomise(
            EuclideanFastAttention(scalars, vectors, max_radius=2.0, out_scalars=2, out_vectors=2)
        ).double()
        x = points([9])
        given = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 3, 3, dtype=torch.float64)
        out = layer(given[0] if scalars else None, given[1] if vectors else None, pos=x["pos"])
        assert [tuple(part.shape) for part in out] == [(9, 2), (9, 2, 3)]
        assert all(float(part.detach().abs().min()) > 0 for part in out)


def test_a_wide_cloud_is_warned_of_once(make):
    layer, x = make("directions", dtype=torch.float32), points(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(**x)
        make("pairs", dtype=torch.float32)(**x | {"pos": 10 * x["pos"]})
        make("auto", dtype=torch.float32)(**{key: t[:9] * 10 for key, t in x.items() if key != "batch"})
    with pytest.warns(UserWarning, match=r"a cloud is .* wide, more than max_radius=3"):
        layer(**x | {"pos": 10 * x["pos"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(**x | {"pos": 10 * x["pos"]})


def test_frequencies_stay_within_what_is_promised(make):
    """Reflected at both ends, where they still learn."""
    layer, x, highest = make("directions", learn_frequencies=True), points(), math.pi / WIDTH
    frequencies = layer.module.attention.frequencies
    with torch.no_grad():
        frequencies.copy_(torch.linspace(0, highest, frequencies.shape[1]).double())
    out = layer(**x)
    for turned in (lambda f: -f, lambda f: 2 * highest - f, lambda f: f + 8 * highest):
        before = frequencies.detach().clone()
        with torch.no_grad():
            frequencies.copy_(turned(before))
        moved = layer(**x)
        assert error(moved, out) < 1e-10
        (grad,) = torch.autograd.grad(moved[0].square().sum() + moved[1].sum(), frequencies)
        assert grad[:, 1:].abs().min() > 0
        with torch.no_grad():
            frequencies.copy_(before)


def test_tables_are_exact_in_every_precision(make):
    """Made in float32 and moved to float64, as made there."""
    moved = make("directions", error=1e-10)
    torch.set_default_dtype(torch.float64)
    try:
        made = EuclideanFastAttention(S, V, max_radius=WIDTH, method="directions", error=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(moved.buffers(), made.buffers(), strict=True):
        assert torch.equal(a, b)
    assert list(moved.state_dict()) == [name for name, _ in moved.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["pairs", "directions"])
def test_autocast(name, dtype, make):
    """Sums of many nodes are computed and returned in float32, and so stay finite."""
    layer, x = make(name, torch.float32), points([300], torch.float32)
    x["scalars"] = 100 * x["scalars"]
    wanted = layer(**x)
    with torch.autocast("cpu", dtype):
        got = layer(**x)
        half = layer(**x | {key: x[key].to(dtype) for key in ("scalars", "vectors")})
    assert all(part.dtype == torch.float32 and part.isfinite().all() for part in (*got, *half))
    assert float(wanted[0].detach().abs().max()) > torch.finfo(torch.float16).max
    close(got, wanted, 1e-5)
    assert error(half, wanted) < 0.05


def test_float32_is_near_float64(make):
    for name in ("pairs", "directions"):
        layer, x = make(name), points()
        wanted = layer(**x)
        got = layer.float()(**{key: t if key == "batch" else t.float() for key, t in x.items()})
        assert error([part.double() for part in got], wanted) < 1e-5


def test_copies_and_parameters_at_the_start(make, check_copies):
    for name in ("pairs", "heads"):
        check_copies(lambda name=name: Whole(make(name)), Whole(make(name)), points([5, 7]))
    layer = make("heads")
    torch.manual_seed(1)
    layer.reset_parameters()
    first = [p.clone() for p in layer.parameters()]
    torch.manual_seed(1)
    layer.reset_parameters()
    close(layer.parameters(), first, 0)
    assert 0.1 < float(layer(**points([200]))[0].detach().std()) < 1e3


OK = {"max_radius": 2.0}


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("max_radius must be a positive number, got 0", {"max_radius": 0}),
        ("max_radius must be a positive number, got inf", {"max_radius": math.inf}),
        ("max_frequency must be a positive number", {"max_frequency": -1.0}),
        ("heads must be a positive integer", {"heads": 0}),
        ("qk_channels must be even, two for each frequency, got 3", {"qk_channels": 3}),
        ("qk_channels must be a positive integer", {"qk_channels": 0}),
        (r"lmax must be an integer in \[0, 8\], got -1", {"lmax": -1}),
        ("qk_lmax must be an integer", {"qk_lmax": 1.5}),
        ("error must be a positive number", {"error": 0.0}),
        ("error must be at least .* take a smaller max_frequency", {"max_frequency": 100.0}),
        ("reduce must be one of .*, got 'max'", {"reduce": "max"}),
        ("num_nodes must be a positive number, got 0", {"num_nodes": 0}),
        ("num_nodes must be None with reduce='mean', got 9", {"num_nodes": 9, "reduce": "mean"}),
        ("method must be one of", {"method": "all"}),
        ("backend must be one of", {"backend": "triton"}),
        ("scalar_channels must be an integer", {"scalar_channels": -1}),
        ("out_vectors must be reachable .* lmax=0", {"vector_channels": 0, "out_vectors": 2, "lmax": 0}),
        ("out_scalars must be reachable", {"scalar_channels": 0, "out_scalars": 2, "lmax": 0}),
    ],
)
def test_bad_options(message, arguments):
    with pytest.raises(ValueError, match=message):
        EuclideanFastAttention(**{"scalar_channels": 2, "vector_channels": 3, **OK, **arguments})


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("pos must be given", {"pos": None}),
        (r"pos must have shape \(9, 3\)", {"pos": torch.ones(9, 2)}),
        (r"scalars must be \(B, N, 3\)", {"scalars": torch.ones(9, 2)}),
        ("vectors must be torch.float32", {"vectors": torch.ones(9, V, 3).double()}),
        ("batch must be sorted", {"batch": torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1])}),
        ("lengths must be None", {"lengths": torch.tensor([9])}),
    ],
)
def test_bad_inputs(message, arguments):
    layer = EuclideanFastAttention(S, V, **OK)
    x = {
        "scalars": torch.ones(9, S),
        "vectors": torch.ones(9, V, 3),
        "pos": torch.ones(9, 3),
        "batch": batch_of([4, 5]),
    }
    with pytest.raises(ValueError, match=message):
        layer(**x | arguments)
