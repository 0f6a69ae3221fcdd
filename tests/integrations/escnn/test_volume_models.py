"""Volumes: our layers between escnn's, whole models, checkpoints and exports."""

import contextlib
import copy
import functools
import io
import pickle

import pytest
import torch
from fields import regular, trivial
from volumes import gspace_of, lattice

with contextlib.redirect_stdout(io.StringIO()):
    from escnn import nn

from tg_equiattn.integrations.escnn import (
    R3AttentionBlock,
    R3GroupAttention,
    R3RegularLayerNorm,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pre-computed.*:UserWarning"),
]


def mixed(gspace, pool, norm):
    """Our layers between escnn's convolution, norm, nonlinearity, pools of space and of the group."""
    volume, hidden = trivial(gspace, 2), regular(gspace, 2)
    options = {"heads": 1, "head_channels": 4, "kernel_size": 3, "relation": "relative"}
    return nn.SequentialModule(
        nn.R3Conv(volume, hidden, 3, padding=1),
        norm(hidden),
        nn.ReLU(hidden),
        R3GroupAttention(hidden, hidden, **options),
        pool(hidden),
        R3AttentionBlock(R3GroupAttention(hidden, hidden, **options)),
        nn.R3Conv(hidden, hidden, 1),
        R3RegularLayerNorm(hidden),
        nn.GroupPooling(hidden),
    )


POOLS = {
    "max": lambda fields: nn.PointwiseMaxPool3D(fields, 2),
    "antialiased mean": lambda fields: nn.PointwiseAvgPoolAntialiased3D(fields, 0.6, stride=2),
}


@pytest.mark.parametrize(
    ("pool", "norm", "side"), [("max", nn.InnerBatchNorm, 4), ("antialiased mean", nn.IIDBatchNorm3d, 5)]
)
def test_models_with_escnns_layers(pool, norm, side):
    """They train, are equivariant under escnn's transform, and come back from checkpoints and exports."""
    gspace = gspace_of("rot2d about x")
    make = functools.partial(mixed, gspace, POOLS[pool], norm)
    model = make()
    x = torch.randn(3, 2, side, side, side)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(5):
        out = model(model.in_type(x)).tensor
        loss = (out.mean((2, 3, 4)) - torch.tensor([[2.0, -3.0]])).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model.eval()
    given = model.in_type(x)
    expected = model(given)
    assert tuple(expected.shape) == tuple(model.evaluate_output_shape(tuple(x.shape)))
    for _, element in lattice(gspace):
        got, wanted = model(given.transform(element)).tensor, expected.transform(element).tensor
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    other = make().eval()
    other.load_state_dict(torch.load(saved, weights_only=True))
    torch.testing.assert_close(other(given).tensor, expected.tensor, rtol=0, atol=1e-6)
    if pool != "max":  # escnn has no export of means over volumes
        return
    plain = model.export()
    for module in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert not any(isinstance(m, nn.EquivariantModule) for m in module.modules())
        torch.testing.assert_close(module(x), expected.tensor, rtol=0, atol=1e-5)
