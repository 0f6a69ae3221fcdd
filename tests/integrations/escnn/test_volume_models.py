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

from tg_equiattn.testing import act

with contextlib.redirect_stdout(io.StringIO()):
    from escnn import gspaces, nn

from tg_equiattn.integrations.escnn import (
    R3AttentionBlock,
    R3GroupAttention,
    R3RegularLayerNorm,
    between_fields,
    group_from_gspace,
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["octa", "dihedral"])
def test_exported_models_compile(name):
    model = mixed(gspace_of(name), POOLS["max"], nn.InnerBatchNorm).eval()
    x = torch.randn(1, 2, 4, 4, 4)
    compiled = torch.compile(model.export(), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(model.in_type(x)).tensor, rtol=0, atol=1e-4)


def test_rotations_restricted_to_the_cube(randomise):
    """From SO(3): escnn restricts the fields, and what follows has the 24 turns of the cube exactly."""
    continuous = gspaces.rot3dOnR3(2)
    volume = trivial(continuous, 1)
    waves = nn.FieldType(continuous, [continuous.irrep(0), continuous.irrep(1)])
    restrict = nn.RestrictionModule(waves, "octa")
    discrete = restrict.out_type
    hidden = regular(discrete.gspace, 1)
    attention = R3GroupAttention(hidden, hidden, heads=1, kernel_size=3, relation="relative")
    model = nn.SequentialModule(
        nn.R3Conv(volume, waves, 3, padding=1), restrict, between_fields(discrete, attention, discrete)
    )
    assert [type(m) for m in model[2]] == [nn.R3Conv, R3GroupAttention, nn.R3Conv]
    randomise(model).eval()
    group, x = group_from_gspace(discrete.gspace), torch.randn(1, 1, 3, 3, 3)
    out = model(volume(x))
    for index, element in lattice(discrete.gspace):
        got, wanted = model(volume(act(x, group, index))).tensor, out.transform(element).tensor
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_equals_the_core(randomise):
    gspace = gspace_of("conical")
    hidden = regular(gspace, 3)
    layer = randomise(R3GroupAttention(hidden, hidden, heads=2, kernel_size=3)).double()
    x = torch.randn(2, 24, 2, 4, 3, dtype=torch.float64)
    expected = layer.core(x.view(2, 3, 8, 2, 4, 3)).reshape(2, 24, 2, 4, 3)
    torch.testing.assert_close(layer(layer.in_type(x)).tensor, expected, rtol=0, atol=0)
    assert repr(layer).startswith("R3GroupAttention(")
