import pytest
import torch
from small_groups import GROUPS

from tg_equiattn.groups import cyclic, mirror, trivial
from tg_equiattn.nn import GEViT, GroupAttention, GroupTransformer, LiftingAttention, RegularGlobalNorm
from tg_equiattn.testing import equivariance_error

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


@pytest.mark.parametrize("preset", ["rotmnist", "cifar10", "patchcamelyon"])
def test_presets_pin_what_the_papers_have(preset):
    """Whatever the defaults: 9 heads of half the width, square 5 x 5 windows (for 8 rotations too), norms, epsilons."""
    model = getattr(GEViT, preset)(cyclic(8))
    layers = [m for m in model.modules() if isinstance(m, (LiftingAttention, GroupAttention))]
    assert len(layers) == 1 + {"rotmnist": 5, "cifar10": 6, "patchcamelyon": 4}[preset]
    for layer in layers:
        assert (layer.heads, layer.head_channels, layer.encoding_name) == (9, layer.out_channels // 2, "axial")
        assert (layer.window.kernel_size, layer.window.shape) == (5, "square")
        assert {m.eps for m in layer.encoding.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-12}
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ and not isinstance(m, torch.nn.LayerNorm)]
    assert {(type(m), m.eps) for m in norms} == {(RegularGlobalNorm, 1e-12)}


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("name", ["C4", "D4", "mirror"])
def test_invariance_and_features(on_device, name, published, randomise):
    group = GROUPS[name]
    if published:
        model = GEViT(group, 2, 5, pools=(0,), crops=1, norm_between=True, **SMALL)
    else:
        model = GroupTransformer(group, 2, 5, pools=(0,), **SMALL)
    model, x = randomise(model).double().eval(), torch.randn(1, 2, 12, 10, dtype=torch.float64)
    assert equivariance_error(model, group, x) <= 1e-10
    assert equivariance_error(model.features, group, x) <= 1e-10
    assert model.features(x).shape == (1, 8, len(group), *((2, 1) if published else (6, 5)))
