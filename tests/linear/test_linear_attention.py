"""Attention by random features, in layers without positions: by definition, ragged, at all norms; and directions."""

import math

import pytest
import torch
from clouds import equal
from oracles import positive_features
from space import batch_of

from tg_equiattn.linear.random_features import draw_directions
from tg_equiattn.nn import PerformerAttention

B, CHANNELS, HEADS, D, E = 3, 4, 2, 7, 5


def layer_of(num_random_features, channels=CHANNELS, heads=HEADS, dim=D):
    options = {"position": None, "key_channels": dim, "num_random_features": num_random_features, "method": "features"}
    return PerformerAttention(channels, heads * E, heads, **options)


@pytest.fixture
def make(randomise):
    return lambda *arguments: randomise(layer_of(*arguments), 0.4).double().eval()


def log_features(layer, x):
    """Logarithms of the features of queries and keys, up to the factor 1 / sqrt(m), and values, (B, heads, N, ...)."""
    query, key, value = (
        linear(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
    )
    w, s, d = layer.features.directions(x.device, x.dtype), layer.positions.variance()[:, None, None], key.shape[-1]
    of_direction = s.log() * (d / 4) + w.square().sum(1) * (1 - s) / 4
    logs = [t / d**0.25 @ w.T * s.sqrt() + of_direction - t.square().sum(-1, keepdim=True) / 2 / d**0.5
            for t in (query, key)]  # fmt: skip
    return *logs, value


def by_definition(layer, x, few=True):
    """Every weight; of few features by its logarithm, which no query or key is too long for."""
    of_query, of_key, value = log_features(layer, x)
    if few:
        score = torch.logsumexp(of_query[..., :, None, :] + of_key[..., None, :, :], -1)
    else:
        score = (of_query.exp() @ of_key.exp().mT).log()
    weights = (score + layer.key_bias(x).mT[:, :, None]).softmax(-1)
    return layer.out((weights @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("size", "nodes", "m"), [(1, 13, 11), (1, 200, 11), (60, 13, 11), (60, 200, 11), (1, 300, 1024)]
)
def test_equals_the_definition(size, nodes, m, make, device):
    """With few scores and many, keys so long that sums of exponentials over- and underflow, and a graph in parts."""
    layer = make(m).to(device)
    with torch.no_grad():
        layer.key.weight.mul_(size)
    x = torch.randn(B if m < 100 else 1, nodes, CHANNELS, dtype=torch.float64, device=device, requires_grad=True)
    equal(layer(x), by_definition(layer, x, m < 100), (x, *layer.parameters()), 1e-8, 1e-9)


SIZES = {"equal": (13, 13, 13), "one long": (1, 33, 5), "long among short": (2, 3, 29, 1, 1, 3), "empty": (0, 39, 0)}


@pytest.mark.parametrize("m", [11, 311])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_ragged_equals_each_graph_alone(sizes, m, make, device):
    layer = make(m).to(device)
    x = torch.randn(sum(sizes), CHANNELS, dtype=torch.float64, device=device)
    out = layer(x, batch=batch_of(sizes).to(device), batch_size=len(sizes))
    torch.testing.assert_close(out, torch.cat([layer(part) for part in x.split(sizes)]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [1e-6, 1.0, 100.0])
def test_norms_up_to_a_hundred_stay_finite_and_right(norm):
    layer, each = layer_of(17, 2 * HEADS * D), norm * torch.eye(2 * HEADS * D)
    with torch.no_grad():
        layer.query.weight.copy_(each[: HEADS * D])
        layer.key.weight.copy_(each[HEADS * D :])
    x = torch.nn.functional.normalize(torch.randn(1, 29, 2 * HEADS, D), dim=-1).flatten(2).requires_grad_()
    out = layer.eval()(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert grad.isfinite().all()
    expected = by_definition(layer.double(), x.detach().double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 if norm == 100 else 1e-5)


def test_orthogonal_blocks_with_gaussian_rows():
    draws = torch.stack([draw_directions(0, number, 11, 5) for number in range(4000)])
    directions = draws / draws.norm(dim=-1, keepdim=True)
    for block in (directions[:, :5], directions[:, 5:10]):
        torch.testing.assert_close(block @ block.mT, torch.eye(5).double().expand(4000, 5, 5), rtol=0, atol=1e-10)
    assert (directions[:, 0] * directions[:, 5]).sum(-1).abs().max() > 0.5  # blocks are independent
    for row in (0, 4, 10):  # each row is N(0, I): mean, covariance, and the squared norm's chi-square moments
        x = draws[:, row]
        assert x.mean(0).abs().max() < 4 / math.sqrt(4000)
        torch.testing.assert_close(x.T @ x / 4000, torch.eye(5).double(), rtol=0, atol=0.12)
        squared = x.square().sum(-1)
        assert abs(squared.mean() - 5) < 4 * math.sqrt(10 / 4000)
        assert abs(squared.var() - 10) < 1.5


def test_unbiased_with_an_error_of_one_over_root_m():
    """The mean over draws is exp<q, k>; the spread falls as 1 / sqrt(m), and orthogonal draws spread less."""
    query, key = 0.25 * torch.randn(2, 9, 8, dtype=torch.float64)
    exact = (query * key).sum(-1).exp()
    draws, errors = 1000, {}

    def estimated(projections):
        products = [positive_features(query, w) * positive_features(key, w) for w in projections]
        return torch.stack(products).mean(-1)

    for m in (8, 64, 512):
        estimates = estimated(draw_directions(0, number, m, 8) for number in range(draws))
        deviation = (estimates.mean(0) - exact) / (estimates.std(0) / math.sqrt(draws))
        assert deviation.abs().max() < 4.5  # standard errors, of nine pairs
        errors[m] = float((estimates / exact - 1).square().mean().sqrt())
    slopes = [math.log(errors[a] / errors[b]) / math.log(b / a) for a, b in ((8, 64), (64, 512))]
    assert slopes == pytest.approx([0.5, 0.5], abs=0.12)
    independent = torch.randn(draws, 8, 8, dtype=torch.float64)
    assert errors[8] < float((estimated(independent) / exact - 1).square().mean().sqrt())


def test_graphs_without_nodes_compile():
    x, batch = torch.zeros(0, CHANNELS), torch.zeros(0, dtype=torch.int64)
    attend = torch.compile(layer_of(16), backend="eager", fullgraph=True)
    assert attend(x, batch=batch, batch_size=3).shape == (0, HEADS * E)
