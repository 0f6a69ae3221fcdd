"""With every weight equal, ours are the published layers and networks, to rounding in float64; their parameters are as
many, and they are invariant."""

import functools

import pytest
import torch
from published_models import (
    PublishedNetwork,
    copy_network,
    elements,
)

from tg_equiattn.group.group_transformer import Classifier
from tg_equiattn.groups import cyclic, dihedral, mirror, trivial
from tg_equiattn.nn import GEViT, GroupTransformer
from tg_equiattn.testing import equivariance_error

GROUPS = {
    "C4": (cyclic(4), elements(4)),
    "C8": (cyclic(8), elements(8)),
    "mirror": (mirror(), elements(1, mirror=True)),
    "D4": (dihedral(4), elements(4, mirror=True)),  # by Eq. 17: the released code has another table
}
SETTINGS = {"locality": None, "window_shape": "square"}


def with_epsilon(module, eps=1e-12):
    """With this epsilon in the encodings, as those of presets have."""
    for norm in module.modules():
        if isinstance(norm, torch.nn.LayerNorm):
            norm.eps = eps
    return module


def difference(a, b):
    assert a.shape == b.shape
    return float(((a - b).abs().max() / b.abs().max()).detach())


NARROW = {  # side and pixels left of the images, ours, and the groups of the published configuration
    "rotmnist": (
        24, 4, {"channels": (8,) * 5, "heads": 2},
        {"lifting": 8, "groups": (2, 3), "widths": (8, 8), "norm_between": False, "pool_last": False},
    ),
    "cifar10": (
        8, 4, {"channels": (8, 8, 16, 16, 16, 16), "heads": 2},
        {"lifting": 8, "groups": (2, 2, 2), "widths": (8, 16, 16), "norm_between": True, "pool_last": False},
    ),
    "patchcamelyon": (
        72, 4, {"channels": (8, 16, 16, 32), "heads": 2, "lifting_channels": 8, "crops": (0, 2, 1, 1)},
        {"lifting": 8, "groups": (0, 1, 2, 1), "widths": (8, 8, 16, 32), "norm_between": True, "pool_last": True},
    ),
}  # fmt: skip
AS_PUBLISHED = {
    "rotmnist": (28, 16, {}, NARROW["rotmnist"][3] | {"lifting": 20, "widths": (20, 20)}),
    "cifar10": (32, 64, {}, NARROW["cifar10"][3] | {"lifting": 96, "widths": (96, 192, 192)}),
    "patchcamelyon": (96, 9, {}, NARROW["patchcamelyon"][3] | {"lifting": 12, "widths": (12, 24, 48, 96)}),
}


ROTMNIST = {
    "channels": (8,) * 5, "heads": 2, "kernel_size": 5, "pools": (2,), "crops": (2, 0, 2, 1, 1), "relation": "ge_vit",
    "norm": "global", "attn_kwargs": SETTINGS,
}  # fmt: skip


def networks(preset, name, window, sizes, randomise, eps=1e-12, ours=None):
    """Our model and the published one with its weights, the pixels a side of images, and our classifier's bias."""
    side, pixels, options, configuration = sizes
    group, matrices = GROUPS[name]
    options = {"kernel_size": window, **options}
    model = getattr(GEViT, preset)(group, **options)
    ours = with_epsilon(randomise(model if ours is None else ours, std=0.5), eps).double().eval()
    blocks = [m for m in model.blocks if hasattr(m, "shortcut")]
    theirs = PublishedNetwork(
        matrices, model.in_channels, model.num_classes, heads=options.get("heads", 9), window=window,
        crops=[block.crop.margin for block in blocks], **configuration,
    ).double()  # fmt: skip
    copy_network(ours, theirs, pixels)
    x = torch.randn(1, model.in_channels, side, side, dtype=torch.float64)
    with torch.no_grad():
        return ours(x), theirs(x) + ours.classifier.bias


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
WHOLE = [
    ("rotmnist", "C4", 5, NARROW["rotmnist"]),
    ("cifar10", "mirror", 5, NARROW["cifar10"]),
    ("patchcamelyon", "C4", 3, NARROW["patchcamelyon"]),
    slow("rotmnist", "C4", 9, NARROW["rotmnist"]),
    slow("rotmnist", "C8", 3, NARROW["rotmnist"]),
    slow("rotmnist", "C4", 5, AS_PUBLISHED["rotmnist"]),
    slow("rotmnist", "C8", 5, AS_PUBLISHED["rotmnist"]),
    slow("cifar10", "mirror", 5, AS_PUBLISHED["cifar10"]),
    slow("patchcamelyon", "C4", 5, AS_PUBLISHED["patchcamelyon"]),
]


@pytest.mark.parametrize(("preset", "name", "window", "sizes"), WHOLE)
def test_whole_models(preset, name, window, sizes, randomise):
    """Crops (of PatchCamelyon ours: 7 pixels are left to the last pool) and pools as published, few channels or all."""
    assert difference(*networks(preset, name, window, sizes, randomise)) < 1e-12


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "layer"},
        {"relation": "lifted"},
        {"attn_kwargs": SETTINGS | {"window_shape": "disk"}},
        {"attn_kwargs": SETTINGS | {"locality": 4.0, "content_heads": 2}},
    ],
    ids=str,
)
def test_other_settings_are_other_models(change, randomise):
    """Negative control: each of the settings that presets pin matters."""
    other = Classifier(GROUPS["C4"][0], 1, 10, **ROTMNIST | change)
    assert difference(*networks("rotmnist", "C4", 5, NARROW["rotmnist"], randomise, ours=other)) > 1e-9


SMALL = {"channels": (6, 8), "heads": 2, "kernel_size": 3}


@pytest.mark.parametrize(
    ("preset", "group", "published"),
    [
        ("rotmnist", cyclic(4), 44_670),
        ("rotmnist", trivial(2), 44_670),
        ("cifar10", mirror(), 2_990_000),
        ("patchcamelyon", cyclic(4), 205_660),
    ],
)
def test_published_parameter_counts(preset, group, published):
    for options in ({}, {"kernel_size": 9}):
        model = getattr(GEViT, preset)(group, **options)
        assert abs(sum(p.numel() for p in model.parameters()) - published) < 0.01 * published


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("name", ["C4", "D4", "mirror"])
def test_invariance_and_features(on_device, name, published, randomise):
    group = GROUPS[name][0]
    if published:
        model = GEViT(group, 2, 5, pools=(0,), crops=1, norm_between=True, **SMALL)
    else:
        model = GroupTransformer(group, 2, 5, pools=(0,), **SMALL)
    model, x = randomise(model).double().eval(), torch.randn(1, 2, 12, 10, dtype=torch.float64)
    assert equivariance_error(model, group, x) <= 1e-10
    assert equivariance_error(model.features, group, x) <= 1e-10
    assert model.features(x).shape == (1, 8, len(group), *((2, 1) if published else (6, 5)))
