"""TensorProductHyenaOperator against a slow evaluation, node by node and pair by pair; chains among zeros."""

import pytest
import torch
from e3nn import o3
from oracles import implicit_filter, lag_sums, taps
from tg_equiattn.integrations.e3nn import TensorProductHyenaOperator

IRREPS = "3x0e+2x1o+1x2e", "2x0e+1x2e+1x1o", "2x0e+3x1o+1x2e+1x0e"
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "short_conv": 3},
    "implicit short": {"filter": "implicit", "short_conv": 3},
    "implicit causal": {"filter": "implicit", "causal": True, "short_conv": 3},
}


def channels(irreps):
    """Which of its irreps each column of a feature belongs to, every copy counted."""
    sizes = [ir.dim for mul, ir in irreps for _ in range(mul)]
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def by_definition(module, x, pos):
    hidden, n = module.irreps_hidden, len(x)
    projected = module.project(torch.cat([x, pos - pos.mean(0)], 1))
    if module.short_conv is not None:
        weight = module.short_conv.weight[channels(hidden + hidden + hidden)]
        projected = taps(projected, weight, module.short_conv.causal)
    query, key, value = projected.chunk(3, 1)
    if module.implicit_filter is not None:
        first = 0 if module.implicit_filter.causal else 1 - n
        h = torch.stack([implicit_filter(module.implicit_filter, lag) for lag in range(first, n)])
        mixed = module.tensor_product(query, lag_sums(key, h[:, channels(hidden)], first))
    else:
        conv = module.convolution
        factor = {"forward": n, "ortho": n**0.5, "backward": 1}[conv.norm]
        seen = [torch.arange(i + 1 if conv.mode == "causal" else n) for i in range(n)]
        mixed = torch.stack([conv.tensor_product(query[j], key[(i - j) % n]).sum(0) for i, j in enumerate(seen)])
        mixed = mixed / factor
    parts = [mixed[:, p].reshape(n, mul, ir.dim) for (mul, ir), p in zip(hidden, hidden.slices(), strict=True)]
    gates = [columns.square().sum(-1) for columns in parts]
    scalars = [c[:, :, 0] for c, (_, ir) in zip(parts, hidden, strict=True) if ir == o3.Irrep("0e")]
    gate = torch.sigmoid(module.gate(torch.cat([*gates, *scalars], 1)))
    own = gate.split([columns.shape[1] for columns in parts], 1)
    gated = torch.cat([(columns * g[..., None]).flatten(1) for columns, g in zip(parts, own, strict=True)], 1)
    return module.out(module.shortcut(x) + module.multiply(gated, value))


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_definition(name, double, device, randomise, equal):
    module = randomise(TensorProductHyenaOperator(*IRREPS, **OPTIONS[name]))
    for n in (1, 2, 5):
        x, pos = module.cpu().irreps_in.randn(n, -1), torch.randn(n, 3)
        wanted = by_definition(module, x, pos)
        direction, weights = torch.randn_like(wanted), [p for p in module.parameters() if p.numel()]
        expected = torch.autograd.grad((wanted * direction).sum(), weights)
        out = module.to(device)(x.to(device), pos.to(device)).cpu()
        equal(out, wanted)
        assert out.is_contiguous()
        for a, b in zip(torch.autograd.grad((out * direction).sum(), weights), expected, strict=True):
            equal(a.cpu(), b.cpu(), 1e-11)
