"""Strategies 1 and 2 of the Relative Performer as layers: by definition, and under translations."""

import copy
import math

import pytest
import torch
from oracles import performer_double_sum
from space import error

from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention

CHANNELS, OUT, HEADS, CUTOFF = 5, 14, 2, 3
GRID = PixelGrid((3, 5), CUTOFF)
MOVE = torch.tensor([3.0, -7.0], dtype=torch.float64)


@pytest.fixture
def make(randomise):
    def build(position, scale=0.4, **options):
        layer = PerformerAttention(CHANNELS, OUT, HEADS, position=position, **{"method": "features", **options})
        return randomise(layer, scale).double().eval()

    return build


def pixels():
    return torch.randn(len(GRID), CHANNELS, dtype=torch.float64), GRID.pos(dtype=torch.float64)


def sinusoid_scores(layer, query, key, pos):
    """Scores <q_i, k_j> + sum of alpha cos(omega (x_i - x_j)) + beta sin(omega (x_i - x_j)) (Lemma 1)"""
    frequency, (alpha, beta) = layer.positions.sinusoid.frequency, layer.positions.sinusoid.rotation
    scores = torch.einsum("ihd,jhd->hij", query, key)
    rows = []
    for i in range(len(pos)):
        angles = (pos[i] - pos)[:, :, None] * frequency  # (j, dim, scales)
        terms = alpha[:, None] * angles.cos() + beta[:, None] * angles.sin()
        rows.append(terms.flatten(2).sum(-1))
    return (scores + torch.stack(rows, 1)) / math.sqrt(query.shape[-1] + layer.positions.extra_channels)


def test_sinusoid_by_definition(make):
    """Over all pairs, the scores are those of Lemma 1: equivariant to translations, exactly."""
    layer, (x, pos) = make("sinusoid", method="pairs"), pixels()
    query, key, value = (f(x).unflatten(-1, (HEADS, -1)) for f in (layer.query, layer.key, layer.value))
    weights = sinusoid_scores(layer, query, key, pos).softmax(-1)
    expected = layer.out(torch.einsum("hij,jhd->ihd", weights, value).flatten(1))
    torch.testing.assert_close(layer(x, pos=pos), expected, rtol=0, atol=1e-12)
    assert error(layer(x, pos=pos + MOVE), expected) < 1e-12
    assert error(layer(x, pos=pos * torch.tensor([1.0, 0.5])), expected) > 1e-3


def test_sinusoid_by_features_is_relative_in_expectation(make):
    """A draw of the features sees a translation; with more features it sees less, and estimates the exact layer."""
    x, pos = pixels()
    exact = make("sinusoid", 0.2, method="pairs")
    weights = {name: w for name, w in exact.state_dict().items() if "_extra_state" not in name}
    moved, apart = [], []
    for count in (64, 16384):
        layer = make("sinusoid", num_random_features=count)
        layer.load_state_dict(weights, strict=False)
        torch.nn.init.zeros_(layer.key_bias.weight)  # which exact layers lack
        moved.append(error(layer(x, pos=pos + MOVE), layer(x, pos=pos)))
        apart.append(error(layer(x, pos=pos), exact(x, pos=pos)))
    assert moved[0] > 1e-3
    assert moved[1] < moved[0] / 4
    assert apart[1] < apart[0] / 4


def test_dropout_of_clipped_heads(make):
    """Whole keys of each head: the mean over many draws is the output without dropout."""
    layer, (x, pos) = make("clipped", dropout=0.3, cutoff=CUTOFF), pixels()
    expected, copies = layer(x, pos=pos), 1000
    found = layer.train()(x.expand(copies, -1, -1), grid=GRID)
    assert error(found[0], expected) > 1e-2
    assert error(found.mean(0), expected) < 0.1


def test_stays_right_where_every_node_is_near():
    """The far row of the table may weigh more than all others by 1e20: with no node far it must not be felt."""
    layer = PerformerAttention(3, 6, 2, position="clipped", cutoff=3, key_channels=1, num_random_features=4).eval()
    layer.positions.distance_table.data = torch.tensor([9.0, 8.9, 9.0, 0.0]).view(1, 4, 1)
    near, x = PixelGrid((1, 2), 3).neighbors(), torch.randn(2, 3)
    exact = copy.deepcopy(layer).double()
    edges, batch = torch.stack([near.source, near.target]), torch.zeros(2, dtype=torch.int64)
    expected = performer_double_sum(exact, x.double(), edges, near.offsets, batch)
    torch.testing.assert_close(layer(x, neighbors=near).double(), expected, rtol=1e-4, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-2
