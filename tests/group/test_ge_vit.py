import pytest
import torch
from small_groups import GROUPS

from tg_equiattn.groups import cyclic, mirror, trivial
from tg_equiattn.nn import GEViT, GroupTransformer
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
