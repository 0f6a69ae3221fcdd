import copy
import functools
import itertools

import pytest
import torch
from attention_operands import assert_same
from cases import moved
from group_layers import GROUPS, LAYERS, PLANAR, attention, image, images_by_oracle

from tg_equiattn.groups import cyclic, dihedral, dyadic, from_generators
from tg_equiattn.nn import GroupAttentionBlock
from tg_equiattn.testing import TOLERANCE, act, equivariance_error
from tg_equiattn.torch_state import Tables

D2, D4, SCALES = dihedral(2), GROUPS["D4"], dyadic(3, cyclic(2))
ABOUT_X = from_generators([[[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]])  # so that all three axes of the geometry matter
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def made(name, group, **options):
    return LAYERS.get(name, functools.partial(attention, relation=name))(group, **options)


def on(device, layer):
    """A copy of the layer on a device, as a function of tensors on the CPU, with gradients of its parameters here."""
    copied = copy.deepcopy(layer).to(device)

    def run(*args, **kwargs):
        there = {name: parameter.to(device) for name, parameter in layer.named_parameters()}
        return torch.func.functional_call(copied, there, moved(args, device), moved(kwargs, device)).cpu()

    return run


LOCAL = [name for name in LAYERS if not name.startswith("global")]
SQUARE = {"window_shape": "square"}
CIRCULAR = {"padding_mode": "circular"}
TWO = ("lifting", "ge_vit")
EVERY = itertools.product((*LOCAL, "gsa"), (3, None), ("axial", "joint"))
DEFINITIONS = [
    *((name, cyclic(3), (3, 3), {"kernel_size": 3}) for name in LOCAL),
    *((name, cyclic(3), (3, 3), {"kernel_size": None, "encoding": "joint"}) for name in TWO),
    *(slow(name, cyclic(3), (3, 3), {"kernel_size": size, "encoding": encoding}) for name, size, encoding in EVERY),
    *((name, ABOUT_X, (2, 2, 2), {"kernel_size": None, "heads": 1}) for name in TWO),
    *((name, ABOUT_X, (2, 2, 1), {"kernel_size": 5, "heads": 1}) for name in TWO),
    *(slow(name, ABOUT_X, (3, 3, 4), {"kernel_size": 3, "heads": 1}) for name in TWO),
    # a side for each axis
    *((name, dihedral(2), (3, 4), {"kernel_size": (1, 5)}) for name in LOCAL),
    *((name, ABOUT_X, (2, 3, 2), {"kernel_size": (3, 3, 1), "heads": 1}) for name in TWO),
    ("frame", dihedral(2), (3, 4), {"kernel_size": (5, 3), "window_shape": "disk", "content_heads": 1}),
    ("relative", dihedral(2), (2, 4), {"kernel_size": (3, 7), **CIRCULAR}),
    # disks of one pixel along an axis
    *((name, cyclic(3), (2, 3), {"kernel_size": 1}) for name in LAYERS),
    ("relative", cyclic(3), (2, 3), {"kernel_size": 1, **CIRCULAR}),
    ("frame", dihedral(2), (2, 3), {"kernel_size": (1, 3), "window_shape": "disk"}),
    ("lifting", ABOUT_X, (2, 2, 1), {"kernel_size": (3, 3, 1), "window_shape": "disk", "heads": 1}),
    # windows larger than the image
    ("lifting", cyclic(3), (3, 3), {"kernel_size": 7}),
    ("ge_vit", cyclic(3), (3, 3), {"kernel_size": 7}),
    ("relative", cyclic(3), (3, 3), {"kernel_size": 9, "encoding": "joint"}),
    # windows that meet pixels twice
    *((name, cyclic(3), (2, 4), {"kernel_size": 5, **SQUARE, **CIRCULAR}) for name in LOCAL),
    ("lifting", ABOUT_X, (2, 2, 3), {"heads": 1, **CIRCULAR}),
    ("lifting", SCALES, (3, 3), {}),
    ("relative", SCALES, (3, 3), {}),
    # D3 has no element that is its own conjugate but the identity, so that a product the wrong way round shows
    ("global", dihedral(3), (3, 3), SQUARE),
    ("global", dihedral(3), (3, 3), SQUARE | CIRCULAR),
]


@pytest.mark.parametrize(("name", "group", "spatial", "options"), DEFINITIONS)
@pytest.mark.filterwarnings("ignore:relation='gsa'")
def test_definition(device, name, group, spatial, options, randomise):
    layer = randomise(made(name, group, **options)).double()
    x = image(group, spatial, name != "lifting", batch=1).requires_grad_()
    run = layer if device == "cpu" else on(device, layer)
    assert_same(run(x), images_by_oracle(layer, name, x), [x, *layer.parameters()], 1e-10)


@pytest.mark.parametrize("change", [{}, {"stride": 2}, {"content_heads": 0}, {"kernel_size": None}], ids=str)
@pytest.mark.parametrize("spatial", [(3, 5), slow((1, 3, 3))], ids=["image", "volume"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_gradients_of_no_images_are_zeros(name, spatial, change):
    if name.startswith("global") and change:
        pytest.skip("has no such arguments")
    group = D4 if len(spatial) == 2 else ABOUT_X
    layer = made(name, group, **change)
    layers = [layer] if name == "lifting" or "stride" in change else [layer, GroupAttentionBlock(layer, norm="layer")]
    for module in layers:
        module.double().zero_grad()
        module(image(group, spatial, name != "lifting", batch=0)).sum().backward()
        for parameter in module.parameters():
            torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), rtol=0, atol=0)


@pytest.mark.parametrize("group", PLANAR)
@pytest.mark.parametrize("name", list(LAYERS))
def test_equivariance(name, group, randomise, device):
    """For every element, and every draw where features are random."""
    group = GROUPS[group]
    layer = randomise(made(name, group)).to(device)
    for dtype, spatial in ((torch.float64, (3, 5)), (torch.float32, (4, 4))):
        if name.startswith("global"):
            layer.redraw_features()
        x = image(group, spatial, name != "lifting", dtype).to(device)
        assert equivariance_error(layer.to(dtype), group, x) <= TOLERANCE[dtype]


WIDE = {"kernel_size": 9}  # the papers' windows meet smaller maps: outside is masked, as at any border
SETTINGS = {
    "all pixels": ({"kernel_size": None}, (3, 3), (3, 4)),
    "joint": ({"encoding": "joint", "window_shape": "disk", "kernel_size": 5}, (6, 5)),
    "wide": (WIDE, (3, 5), (1, 1)),
    "wide disk": (WIDE | {"window_shape": "disk"}, (4, 4)),
    "circular": (CIRCULAR, (5, 6)),
    "circular disk": (CIRCULAR | {"window_shape": "disk", "kernel_size": 5}, (4, 4)),
    "volume": ({"heads": 1}, (2, 3, 4)),
    "volume, all voxels": ({"heads": 1, "kernel_size": None}, (2, 2, 3)),
}
NONE = [*((name, setting) for name in ("global", "global frame") for setting in ("all pixels", "volume, all voxels")),
        ("global frame", "volume")]  # fmt: skip


THOROUGH = ("lifting", "frame", "ge_vit", "global")  # layers whose every setting is in the gate
LAYERS_AND_SETTINGS = [
    pytest.param(name, setting, marks=() if name in THOROUGH or setting == "wide" else pytest.mark.slow)
    for name in LAYERS
    for setting in SETTINGS
    if (name, setting) not in NONE
]


@pytest.mark.parametrize(("name", "setting"), LAYERS_AND_SETTINGS)
def test_equivariance_of_settings(on_device, name, setting, randomise):
    options, *sizes = SETTINGS[setting]
    group, elements = (GROUPS["octahedral"], (1, 2, 7, 16, 23)) if "volume" in setting else (D4, range(8))
    layer = randomise(made(name, group, **options)).double()
    for spatial in sizes:
        x = image(group, spatial, name != "lifting", batch=1)
        assert equivariance_error(layer, group, x, elements=elements) <= 1e-10


@pytest.mark.parametrize("group", ["D4", "C8", "mirror"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_equivariance_with_masks_and_contexts(name, group, randomise, device):
    """All are moved: exact for every element; where one is left as it is, it is not."""
    group = GROUPS[group]
    layer = randomise(made(name, group, context_channels=5)).to(device)
    for dtype, spatial in ((torch.float32, (3, 5)), (torch.float64, (4, 4))):
        layer, x = layer.to(dtype), image(group, spatial, name != "lifting", dtype).to(device)
        context, mask = torch.randn(2, 5, *x.shape[2:]).to(x), (torch.rand(2, *spatial) < 0.6).to(device)
        expected, largest = layer(x, mask, context=context, context_mask=mask), 0.0
        for g in group.lattice.nonzero().flatten().tolist():
            moved, beside, wanted = (act(t, group, g) for t in (x, context, expected))
            turned = act(mask[:, None].to(dtype), group, g)[:, 0] > 0.5

            def error(mask, context, layer=layer, moved=moved, wanted=wanted):
                out = layer(moved, mask, context=context, context_mask=mask)
                return float((out - wanted).detach().abs().max())

            assert error(turned, beside) <= TOLERANCE[dtype] * expected.abs().max()
            if g != group.identity and dtype == torch.float64:
                largest = max(largest, error(mask, beside))
                assert error(turned, context) > 1e-2
    assert largest > 1e-2


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
    exact = layer.geometry(torch.device("cpu"))[group.inverse].contiguous()
    layer.geometry = Tables(lambda: exact)
    assert equivariance_error(layer, group, image(group, (5, 5), True)) > 1e-3


@pytest.mark.parametrize("name", ["lifting", "relative"])
def test_places_that_do_not_turn_are_not_equivariant(name, randomise):
    """Negative control: every element looks at the same pixels."""
    layer = randomise(made(name, GROUPS["C4"])).double()
    turned = layer.locality.forward
    layer.locality.forward = lambda offsets: turned(offsets[:1].expand_as(offsets))
    assert equivariance_error(layer, GROUPS["C4"], image(GROUPS["C4"], (5, 5), name != "lifting")) > 1e-3


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_rolls(name, plain, randomise):
    """Of images without borders; with borders they are not exact."""
    x = image(D4, (3, 4), name != "lifting")
    for mode, exact in (("circular", True), ("mask", False)):
        layer = randomise(made(name, D4, padding_mode=mode)).double()
        layer.plain = plain
        out = layer(x).detach()
        error = (layer(x.roll((2, -1), (-2, -1))) - out.roll((2, -1), (-2, -1))).abs().max() / out.abs().max()
        assert error <= 1e-12 if exact else error > 1e-2
