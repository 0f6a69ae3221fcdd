"""Random features, and attention through them, dense and ragged."""

import math

import pytest
import torch
from clouds import double, equal
from space import batch_of

from tg_equiattn.functional import linear_attention, orthogonal_projection, softmax_features

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

B, HEADS, N, D, E, M = 3, 2, 13, 7, 5, 11


@pytest.fixture
def qkvw(device):
    shapes = (B, HEADS, N, D), (B, HEADS, N, D), (B, HEADS, N, E), (M, D)
    return tuple(double(*shape).to(device) for shape in shapes)


def log_features(query, key, projection):
    scale = query.shape[-1] ** -0.5
    return [t * scale**0.5 @ projection.T - scale * t.square().sum(-1, keepdim=True) / 2 for t in (query, key)]


def by_definition(query, key, value, projection):
    """Every weight, by its logarithm, which no query or key is too long for."""
    of_query, of_key = log_features(query, key, projection)
    score = torch.logsumexp(of_query[..., :, None, :] + of_key[..., None, :, :], -1)
    return score.softmax(-1) @ value


def flat(t):
    return t.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("size", [1, 60], ids=["plain", "stabilised"])
def test_equals_the_definition(size, qkvw):
    """On the CPU exponentials are first tried plain; long keys make their sums over- and underflow."""
    query, key, value, projection = (t.requires_grad_(n < 3) for n, t in enumerate(qkvw))
    outs = (f(query, size * key, value, projection) for f in (linear_attention, by_definition))
    equal(*outs, (query, key, value), 1e-9, 1e-10)


SIZES = {"equal": (13, 13, 13), "one long": (1, 33, 5), "long among short": (2, 3, 29, 1, 1, 3), "empty": (0, 39, 0)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_ragged_equals_each_graph_alone(sizes, qkvw):
    query, key, value = (flat(t) for t in qkvw[:3])
    projection = qkvw[3]
    batch = batch_of(sizes).to(query.device)
    out = linear_attention(query, key, value, projection, batch=batch, batch_size=len(sizes))
    parts = zip(*(t.split(sizes) for t in (query, key, value)), strict=True)
    alone = [linear_attention(*part, projection) for part in parts]
    torch.testing.assert_close(out, torch.cat(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [1e-6, 1.0, 100.0])
def test_norms_up_to_a_hundred_stay_finite_and_right(norm):
    query, key, value = torch.randn(3, 1, 2, 29, 7)
    query, key = (norm * t / t.norm(dim=-1, keepdim=True) for t in (query, key))
    query.requires_grad_()
    projection = orthogonal_projection(17, 7).float()
    out = linear_attention(query, key, value, projection)
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert out.isfinite().all()
    assert grad.isfinite().all()
    expected = by_definition(*(t.detach().double() for t in (query, key, value, projection)))
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 if norm == 100 else 1e-5)


def test_orthogonal_blocks_with_gaussian_rows():
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([orthogonal_projection(11, 5, generator) for _ in range(4000)])
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
    again = orthogonal_projection(11, 5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws[0], again, rtol=0, atol=0)


def test_unbiased_with_an_error_of_one_over_root_m():
    """The mean over draws is exp<q, k>; the spread falls as 1 / sqrt(m), and orthogonal draws spread less."""
    generator = torch.Generator().manual_seed(0)
    query, key = 0.25 * torch.randn(2, 9, 8, generator=generator, dtype=torch.float64)
    exact = (query * key).sum(-1).exp()
    draws, errors = 1000, {}

    def estimated(projections):
        return torch.stack([(softmax_features(query, w) * softmax_features(key, w)).sum(-1) for w in projections])

    for m in (8, 64, 512):
        estimates = estimated(orthogonal_projection(m, 8, generator) for _ in range(draws))
        deviation = (estimates.mean(0) - exact) / (estimates.std(0) / math.sqrt(draws))
        assert deviation.abs().max() < 4.5  # standard errors, of nine pairs
        errors[m] = float((estimates / exact - 1).square().mean().sqrt())
    slopes = [math.log(errors[a] / errors[b]) / math.log(b / a) for a, b in ((8, 64), (64, 512))]
    assert slopes == pytest.approx([0.5, 0.5], abs=0.12)
    independent = torch.randn(draws, 8, 8, generator=generator, dtype=torch.float64)
    assert errors[8] < float((estimated(independent) / exact - 1).square().mean().sqrt())


def test_graphs_without_nodes_compile():
    """Compiled, sizes of graphs are not read, and chunks of graphs are the rows."""
    query, batch = double(0, 2, 4), torch.zeros(0, dtype=torch.int64)
    attend = torch.compile(linear_attention, backend="eager", fullgraph=True)
    assert attend(query, query, query, double(16, 4), batch=batch, batch_size=3).shape == (0, 2, 4)
