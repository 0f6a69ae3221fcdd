import pytest
import torch
from group_layers import LAYERS, attention, image, lifting, oracle
from small_groups import GROUPS, PLANAR

from tg_equiattn.groups import cyclic, dihedral, from_generators
from tg_equiattn.testing import TOLERANCE, equivariance_error

RELATIONS = ["frame", "ge_vit", "lifted", "relative"]


EVERY_DEFINITION = [(r, k, e) for r in (None, *RELATIONS, "gsa") for k in (3, None) for e in ("axial", "joint", "full")]
IN_THE_GATE = [(r, 3, "axial") for r in (None, *RELATIONS)] + [
    (r, None, e) for r in (None, "ge_vit") for e in ("joint", "full")
]
LARGER = [(None, 7, "axial"), ("ge_vit", 7, "full"), ("relative", 9, "joint")]  # than the image


@pytest.mark.parametrize(
    ("relation", "kernel_size", "encoding"),
    [pytest.param(*c, marks=() if c in IN_THE_GATE else pytest.mark.slow) for c in EVERY_DEFINITION] + LARGER,
)
@pytest.mark.filterwarnings("ignore:relation='gsa'")
def test_definition(on_device, relation, kernel_size, encoding, randomise):
    group = dihedral(2) if encoding == "axial" else cyclic(3)
    options = {"kernel_size": kernel_size, "encoding": encoding}
    layer = lifting(group, **options) if relation is None else attention(group, relation=relation, **options)
    layer = randomise(layer).double()
    x = image(group, (3, 4), relation is not None, batch=1).requires_grad_()
    expected, actual = oracle(layer, x, relation), layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    inputs = [x, *layer.parameters()]
    probe = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((actual * probe).sum(), inputs), torch.autograd.grad((expected * probe).sum(), inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kernel_size", "spatial"), [pytest.param(3, (3, 3, 4), marks=pytest.mark.slow), (None, (2, 3, 2)), (5, (2, 2, 1))]
)
@pytest.mark.parametrize("relation", [None, "ge_vit"])
def test_definition_in_three_dimensions(on_device, relation, kernel_size, spatial, randomise):
    """A quarter turn about x, so that all three axes of the geometry matter."""
    group = from_generators([[[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]])
    options = {"kernel_size": kernel_size, "heads": 1}
    layer = lifting(group, **options) if relation is None else attention(group, relation=relation, **options)
    layer = randomise(layer).double()
    x = image(group, spatial, relation is not None, batch=1)
    torch.testing.assert_close(layer(x), oracle(layer, x, relation), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kernel_size", "spatial"), [(3, (6, 6)), (3, (4, 7)), (None, (3, 3)), (None, (3, 4))])
@pytest.mark.parametrize("relation", [None, *RELATIONS])
def test_equivariance_on_images(relation, kernel_size, spatial, randomise, device):
    for group in PLANAR.values():
        make = lifting if relation is None else attention
        options = {"kernel_size": kernel_size} | ({} if relation is None else {"relation": relation})
        layer = randomise(make(group, **options)).to(device)
        for dtype in (torch.float64, torch.float32):
            x = image(group, spatial, relation is not None, dtype).to(device)
            assert equivariance_error(layer.to(dtype), group, x) <= TOLERANCE[dtype]


@pytest.mark.parametrize("encoding", ["joint", "full"])
@pytest.mark.parametrize("relation", [None, *RELATIONS])
def test_equivariance_of_other_encodings(on_device, relation, encoding, randomise):
    group = GROUPS["D4"]
    make = lifting if relation is None else attention
    options = {"encoding": encoding, "neighbourhood": "disk", "kernel_size": 5}
    layer = randomise(make(group, **options, **({} if relation is None else {"relation": relation}))).double()
    assert equivariance_error(layer, group, image(group, (6, 5), relation is not None)) <= 1e-10


@pytest.mark.parametrize("shape", ["square", "disk"])
@pytest.mark.parametrize("relation", [None, *RELATIONS])
def test_equivariance_of_windows_larger_than_the_image(on_device, relation, shape, randomise):
    """The papers' 9 x 9 windows meet maps of 6 x 6: outside is masked, as at any border."""
    group = GROUPS["D4"]
    make = lifting if relation is None else attention
    options = {"kernel_size": 9, "neighbourhood": shape} | ({} if relation is None else {"relation": relation})
    layer = randomise(make(group, **options)).double()
    for spatial in ((6, 6), (3, 5), (1, 1)):
        assert equivariance_error(layer, group, image(group, spatial, relation is not None, batch=1)) <= 1e-10


@pytest.mark.parametrize(
    ("kernel_size", "spatial"), [(3, (3, 3, 3)), (3, (3, 4, 5)), (None, (2, 2, 2)), (None, (2, 3, 4))]
)
@pytest.mark.parametrize("relation", [None, *RELATIONS])
def test_equivariance_on_volumes(on_device, relation, kernel_size, spatial, randomise):
    group = GROUPS["octahedral"]
    make = lifting if relation is None else attention
    options = {"kernel_size": kernel_size, "heads": 1} | ({} if relation is None else {"relation": relation})
    layer = randomise(make(group, **options)).double()
    x = image(group, spatial, relation is not None, batch=1)
    elements = range(24) if relation in (None, "frame", "relative") else (1, 2, 7, 16, 23)
    assert equivariance_error(layer, group, x, elements=elements) <= 1e-10


@pytest.mark.parametrize("name", ["C4", "C8", "D2", "D4", "mirror"])
def test_gsa_is_not_equivariant(name, randomise):
    """Negative control: the published GSA-Nets relation fails the check that ge_vit passes."""
    group = GROUPS[name]
    with pytest.warns(UserWarning, match="relation='gsa' .* is not equivariant"):
        layer = attention(group, relation="gsa", encoding="joint")
    assert equivariance_error(randomise(layer).double(), group, image(group, (5, 5), True)) > 1e-3


def test_wrong_geometry_is_not_equivariant(randomise):
    """Negative control: transposing the rotations (h instead of its inverse) fails the check."""
    group = GROUPS["C4"]
    layer = randomise(attention(group)).double()
    layer.geometry = layer.geometry[group.inverse].contiguous()
    assert equivariance_error(layer, group, image(group, (5, 5), True)) > 1e-3


def test_translation(on_device, randomise):
    """Away from the border the layer commutes with shifts."""
    layer = randomise(attention(GROUPS["C4"])).double()
    x = torch.zeros(1, 3, 4, 9, 9, dtype=torch.float64)
    x[..., 3:5, 3:5] = torch.randn(1, 3, 4, 2, 2, dtype=torch.float64)
    shifted = layer(x.roll((1, 2), (-2, -1)))
    torch.testing.assert_close(shifted[..., 2:8, 3:8], layer(x)[..., 1:7, 1:6], rtol=0, atol=1e-10)


def test_geometry_survives_dtype_conversion(randomise):
    """Offsets stay exact through .float().double(), as off-lattice elements need."""
    layer = attention(cyclic(8))
    exact = layer.offsets((5, 5)).clone()
    assert torch.equal(layer.half().double().offsets((5, 5)), exact)
    assert exact.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be a positive integer, got 0"),
        ({"head_channels": -1}, "head_channels must be a positive integer, got -1"),
        ({"kernel_size": 4}, "kernel_size must be a positive odd integer or None .* got 4"),
        ({"kernel_size": -5}, "kernel_size must be .* got -5"),
        ({"relation": "gevit"}, "relation must be one of .* got 'gevit'"),
        ({"encoding": "sine"}, "encoding must be one of .* got 'sine'"),
        ({"neighbourhood": "ring"}, "neighbourhood must be one of .* got 'ring'"),
        ({"redraw_interval": 3}, "options must be of encoding, .* scale_window, got redraw_interval"),
        ({"dropout": "a"}, r"dropout must be in \[0, 1\), got 'a'"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        attention(cyclic(4), **change)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 3, 3, 5, 5), r"input must have shape \(B, 3, 4, H, W\), got \(2, 3, 3, 5, 5\)"),
        (torch.randn(2, 3, 4, 0, 5), r"at least one pixel on every spatial axis, got \(2, 3, 4, 0, 5\)"),
        (torch.zeros(2, 3, 4, 5, 5, dtype=torch.uint8), "floating point tensor, got torch.uint8"),
        (torch.randn(2, 3, 4, 5, 5).double(), "must be torch.float32 as the parameters are, got torch.float64"),
        (torch.randn(2, 3, 4, 5, 5, device="meta"), "must be on cpu as the parameters are, got meta"),
    ],
)
def test_bad_input(x, message):
    with pytest.raises(ValueError, match=message):
        attention(cyclic(4))(x)


def test_checkpoints_know_what_they_are_of(tmp_path):
    """Weights of another relation, kernel size or group have the same shapes, and are refused all the same."""
    options = {"relation": "ge_vit", "kernel_size": 3}
    layer, path = attention(cyclic(4), **options), tmp_path / "weights.pt"
    torch.save(layer.state_dict(), path)
    state = torch.load(path, weights_only=True)
    attention(cyclic(4), **options).load_state_dict(state)
    attention(GROUPS["C4"], **options).load_state_dict(state)
    for group, change, message in (
        (cyclic(4), {"relation": "relative"}, "of a layer with relation='relative', as this one, got 'ge_vit'"),
        (cyclic(4), {"kernel_size": 7}, "of a layer with kernel_size=7, as this one, got 3"),
        (cyclic(4), {"kernel_size": None}, "of a layer with kernel_size=None, as this one, got 3"),
        (dihedral(2), {}, r"of a layer with group='D2\(order=4, dim=2\)', as this one, got 'C4"),
    ):
        other = attention(group, **options | change)
        for strict in (True, False):
            with pytest.raises(ValueError, match=message):
                other.load_state_dict(state, strict=strict)


@pytest.mark.parametrize("name", list(LAYERS))
def test_no_images(name, randomise):
    """Nor gradients, first or second."""
    layer = randomise(LAYERS[name](GROUPS["C4"]))
    x = image(GROUPS["C4"], (5, 6), name != "lifting", torch.float32, batch=2)[:0].requires_grad_()
    out = layer(x)
    assert out.shape == (0, 7, 4, 5, 6)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.sum() + first.square().sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())
