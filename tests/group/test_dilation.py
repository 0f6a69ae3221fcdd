"""Scales: lifting and group attention on the dilation group, times a finite group."""

import group_layers
import pytest
import torch

from tg_equiattn.groups import cyclic, dihedral, dyadic, trivial
from tg_equiattn.nn import GroupTransformer, LiftingAttention
from tg_equiattn.testing import TOLERANCE, dilation_errors, equivariance_error

ISOMETRIES = {"none": trivial(2), "C4": cyclic(4), "D4": dihedral(4), "volume": trivial(3)}
SIZES = {2: (5, 6), 3: (3, 4, 2)}


def lifting(group, **arguments):
    return group_layers.lifting(group, **arguments).double()


def attention(group, **arguments):
    return group_layers.attention(group, **arguments).double()


def given(layer, spatial=None, batch=2):
    elements = [] if isinstance(layer, LiftingAttention) else [len(layer.group)]
    shape = batch, layer.in_channels, *elements, *(spatial or SIZES[layer.group.dim])
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(params=list(ISOMETRIES))
def isometries(request):
    return ISOMETRIES[request.param]


def exact_scales(scales, window, depth=1):
    """From which scale features go up one exactly: no end cuts a window of scales, there or above."""
    reach = depth * (window // 2)
    return [reach <= j < scales - 1 - reach for j in range(scales - 1)]


@pytest.mark.parametrize("encoding", ["axial", "joint"])
def test_lifting_of_repeated_pixels(isometries, encoding, randomise):
    """Features go up one scale, borders included."""
    group = dyadic(3, isometries)
    layer = randomise(lifting(group, encoding=encoding), 0.5)
    for spatial in (SIZES[group.dim], (1, 3, 2)[: group.dim]):
        assert max(dilation_errors(layer, group, given(layer, spatial))) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("window", [1, 3, 5])
def test_attention_to_repeated_pixels(isometries, window, randomise):
    """Exact for the scales whose window no end cuts, before and after; and for no other."""
    group = dyadic(5 if isometries is not ISOMETRIES["volume"] else 3, isometries)
    layer = randomise(attention(group, scale_window=window), 0.5)
    errors = dilation_errors(layer, group, given(layer, (2, 3, 2)[: group.dim], batch=1))
    for error, exact in zip(errors, exact_scales(group.scales, window), strict=True):
        assert error <= TOLERANCE[torch.float64] if exact else error > 1e-3


DISK, CIRCULAR = {"kernel_size": 5, "window_shape": "disk"}, {"padding_mode": "circular"}


@pytest.mark.parametrize(
    ("options", "masked"), [(DISK, False), (CIRCULAR, False), ({"locality": None, "kernel_size": 5}, False), ({}, True)]
)
def test_kinds_of_windows(options, masked, randomise):
    group, there = dyadic(3, cyclic(4)), torch.rand(2, 4, 8) < 0.7
    for layer in (lifting(group, **options), attention(group, scale_window=1, **options)):

        def module(x, layer=layer):
            times = x.shape[-1] // 8
            return layer(x, there.repeat_interleave(times, 1).repeat_interleave(times, 2) if masked else None)

        x = given(randomise(layer, 0.5), (4, 8))
        assert max(dilation_errors(module, group, x)) <= TOLERANCE[torch.float64]
        if options is CIRCULAR:
            x = x[..., :7]  # whatever the scales
            rolled = layer(x.roll((1, -3), (-2, -1)))
            torch.testing.assert_close(rolled, layer(x).roll((1, -3), (-2, -1)), rtol=0, atol=1e-12)


def test_factors_as_printed(randomise):
    """Negative control: the paper's factors (Eq. 20, 21) on what heads put out break what they should keep."""
    group = dyadic(3, cyclic(4))
    scales = 2.0 ** torch.arange(3).repeat_interleave(4)[:, None, None]
    for layer, power in ((lifting(group), 2), (attention(group, scale_window=1), 3)):
        x = given(randomise(layer, 0.5))
        assert max(dilation_errors(layer, group, x)) <= TOLERANCE[torch.float64]
        layer.out.register_forward_pre_hook(lambda _, out, power=power: out[0] / scales**power)
        assert min(dilation_errors(layer, group, x)) > 1e-2


def test_isometries(isometries, randomise, device):
    group = dyadic(2, isometries)
    sizes = {2: ((3, 4), (4, 4)), 3: ((3, 4, 2), (2, 2, 2))}[group.dim]
    for make in (lifting, attention):
        layer, elements = randomise(make(group), 0.5).to(device), range(len(isometries))
        for (dtype, allowed), spatial in zip(TOLERANCE.items(), sizes, strict=True):
            x = given(layer, spatial).to(device, dtype)
            assert equivariance_error(layer.to(dtype), group, x, elements=elements) <= allowed


@pytest.mark.parametrize(
    ("norm", "window", "scales", "isometries"),
    [("batch", 1, 3, cyclic(4)), ("layer", 1, 3, cyclic(4)), ("layer", 3, 6, trivial(2))],
)
def test_model(norm, window, scales, isometries, randomise):
    """Features of a whole model go up one scale; with windows of three scales those no end has reached."""
    group, options = dyadic(scales, isometries), {"channels": (4, 4), "heads": 2, "kernel_size": 3, "norm": norm}
    model = randomise(
        GroupTransformer(group, 2, 5, attn_kwargs={"scale_window": window}, **options).double(), 0.5
    ).eval()
    side = 5 * 2 ** (scales - 3)  # wide for the largest scale
    errors = dilation_errors(model.features, group, torch.randn(1, 2, 2, side).double())
    for error, exact in zip(errors, exact_scales(scales, window, depth=2), strict=True):
        assert error <= TOLERANCE[torch.float64] if exact else error > 1e-7
    x, quarter = torch.randn(2, 2, 4, 4).double(), range(len(isometries))
    assert model(x).shape == (2, 5)
    assert equivariance_error(model, group, x, elements=quarter) <= TOLERANCE[torch.float64]
