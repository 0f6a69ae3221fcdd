import pytest
import torch
from group_layers import GROUPS

from tg_equiattn.group.layers import RegularBatchNorm, SpatialCrop, SpatialMaxPool
from tg_equiattn.nn import GlobalPooling, RegularGlobalNorm, RegularLayerNorm
from tg_equiattn.testing import equivariance_error

X = torch.randn(2, 7, 4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NORMS = {  # of what axes they are one mean and variance, and their epsilon
    RegularLayerNorm: ((1,), 1e-5),
    RegularGlobalNorm: ((1, 2, 3, 4), 1e-12),
    RegularBatchNorm: ((0, 2, 3, 4), 1e-5),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_of_one_mean_and_variance(on_device, kind, randomise):
    """And, of batches when they do not train, each image's own."""
    norm, (axes, epsilon), x = randomise(kind(7)).double(), NORMS[kind], X.to(on_device)
    norm = norm.to(on_device)
    std = x.var(axes, correction=0, keepdim=True).add(epsilon).sqrt()
    expected = (x - x.mean(axes, keepdim=True)) / std * norm.weight.view(1, 7, 1, 1, 1) + norm.bias.view(1, 7, 1, 1, 1)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)
    norm.eval()
    torch.testing.assert_close(norm(x[:1]), norm(x)[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["C4", "D4", "octahedral"])
@pytest.mark.parametrize(
    "module",
    [
        RegularGlobalNorm(3), RegularLayerNorm(3), RegularBatchNorm(3), SpatialMaxPool(2), SpatialCrop(1),
        GlobalPooling(), GlobalPooling(None), GlobalPooling(None, "mean"), GlobalPooling("sum", "mean"),
    ],
    ids=repr,
)  # fmt: skip
def test_equivariance(on_device, name, module, randomise):
    group = GROUPS[name]
    spatial = (4, 6, 4)[: group.dim]
    x = torch.randn(2, 3, len(group), *spatial, dtype=torch.float64)
    module = randomise(module).double().to(on_device)
    assert equivariance_error(module, group, x) <= 1e-10
    if isinstance(module, GlobalPooling):
        assert module(x).shape == (2, 3) if module.space else (2, 3, *spatial)
