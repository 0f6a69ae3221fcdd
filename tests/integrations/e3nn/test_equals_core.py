"""The e3nn modules against those of tg_equiattn.nn with the same parameters."""

import pytest
import torch
from space import batch_of, take_weights
from tg_equiattn.integrations import e3nn as irreps_modules

from tg_equiattn import nn as core_modules

S, V = 5, 3
HIDDEN = {"hidden_scalars": 2, "hidden_vectors": 7}
OUT = {"out_scalars": 7, "out_vectors": 2}
LOCAL = {"local_context": True, "edge_channels": 2}
SIZES = 7, 1, 11

CASES = {
    "hyena": ("SE3HyenaOperator", {}),
    "local": ("SE3HyenaOperator", {"order": "radial", **LOCAL}),
    "model": ("SE3Hyena", {"num_layers": 2, "attn_kwargs": LOCAL, "num_blocks": 2}),
    "pooled": ("SE3Hyena", {"num_layers": 2, "pool": "mean", "order": "radial"}),
    "attention": ("VectorSelfAttention", {}),
    "implicit causal model": (
        "SE3Hyena",
        {"num_layers": 1, "attn_kwargs": {"filter": "implicit", "causal": True, "short_conv": 3}},
    ),
    "attention short": ("VectorSelfAttention", {"short_conv": 3}),
    "attention local": ("VectorSelfAttention", LOCAL),
}


@pytest.mark.parametrize("case", CASES)
def test_equal(case, double, device, randomise, equal):
    name, options = CASES[case]
    module = getattr(irreps_modules, f"Irreps{name}")("5x0e+3x1o", "7x0e+2x1o", "2x0e+7x1o", **options)
    core = getattr(core_modules, name)(S, V, **OUT, **HIDDEN, **options)
    core.module.load_state_dict(randomise(module).module.state_dict())
    module, core = module.to(device), core.to(device)
    batch = batch_of(SIZES).to(device)
    scalars, vectors = torch.randn(len(batch), S, device=device), torch.randn(len(batch), V, 3, device=device)
    pos = None if "causal" in case else torch.randn(len(batch), 3, device=device)
    edges = {}
    if "edge_channels" in {**options, **options.get("attn_kwargs", {})}:
        edge_index = (batch[:, None] == batch).nonzero().T
        edges = {"edge_index": edge_index, "edge_attr": torch.randn(edge_index.shape[1], 2, device=device)}
    x = torch.cat([scalars, vectors.flatten(1)], 1)
    place = torch.arange(len(batch), device=device)
    chains = {} if options.get("order") == "radial" else {"chain": place % 2, "index": 2 * place}
    for arguments in (edges, edges | chains, edges | {"batch_size": 3, "max_num_nodes": 13}):
        got = module(x, pos, batch, **arguments)
        wanted = core(scalars, vectors, pos=pos, batch=batch, **arguments)
        equal(got, torch.cat([part.flatten(1) for part in wanted], 1))
        assert got.abs().amax(0).min() > 1e-3


@pytest.mark.parametrize("case", ["hyena", "attention", "pooled"])
def test_order_of_irreps_is_only_layout(case, double, randomise, equal):
    """Blocks may come in any order and be split; the parameters are the same."""
    name, options = CASES[case]
    make = getattr(irreps_modules, f"Irreps{name}")
    hidden = "3x0e+3x1o+2x1e+2x0o"
    module = randomise(make("5x0e+3x1o+2x1e+1x0o", "2x0e+3x1o", hidden, **options))
    other = make("1x0o+2x1o+4x0e+1x1e+1x1o+1x0e+1x1e", "1x1o+2x0e+2x1o", hidden, **options)
    take_weights(other, module)
    scalars, vectors = torch.randn(19, 6), torch.randn(19, 5, 3)
    x = torch.cat([scalars[:, :5], vectors.flatten(1), scalars[:, 5:]], 1)
    pieces = [scalars[:, 5:], vectors[:, :2], scalars[:, :4], vectors[:, 3:4], vectors[:, 2:3]]
    pieces += [scalars[:, 4:5], vectors[:, 4:]]
    pos, batch = torch.randn(19, 3), batch_of(SIZES)
    got = other(torch.cat([piece.flatten(1) for piece in pieces], 1), pos, batch)
    equal(torch.cat([got[:, 3:5], got[:, :3], got[:, 5:]], 1), module(x, pos, batch))
