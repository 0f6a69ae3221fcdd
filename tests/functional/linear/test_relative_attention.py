"""The window and strategy 2 on grids against their naive double sums, and the products over pairs they rest on."""

import math

import pytest
import torch
from oracles import positive_features

from tg_equiattn.functional import clipped_attention, window_attention
from tg_equiattn.functional.linear import edge_products as edge_ops
from tg_equiattn.functional.linear.attention import features_attention, log_norm
from tg_equiattn.functional.linear.relative_attention import distance_weights, ring_sums
from tg_equiattn.functional.linear.rows import Rows
from tg_equiattn.grids import PixelGrid

HEADS, D, E, M = 3, 5, 7, 11
GRID = PixelGrid((5, 7), 3)
TORUS = PixelGrid((5, 7), 3, periodic=True)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def offset(i, j, grid):
    """x_j - x_i of two pixels in (x, y), the shortest one on a torus."""
    height, width = grid.shape
    dx, dy = j % width - i % width, i // width - j // width
    if grid.periodic:
        dx = (dx + width // 2) % width - width // 2
        dy = (dy + height // 2) % height - height // 2
    return dx, dy


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("grid", [GRID, TORUS], ids=["grid", "torus"])
def test_window_equals_the_double_sum(on_device, grid, copies):
    n = len(grid) * copies
    query, key, value = (double(n, HEADS, width).requires_grad_() for width in (D, D, E))
    projection, table = double(M, D), double(HEADS, 5, 5).requires_grad_()
    near = grid.neighbours(copies, on_device)
    x, y = (near.offsets + 2).unbind(1)
    far, level = features_attention(query, key, value, projection, "softmax", None, Rows(n, copies))
    far = far, level + log_norm(query, "softmax", None, M) + 0.3
    out = window_attention(query, key, value, table[:, x, y], table[:, 2, 2], far, near)
    phi_query, phi_key = (positive_features(t / D**0.25, projection) for t in (query, key))
    rows = []
    for i in range(n):
        weights = torch.zeros(n, HEADS, dtype=torch.float64)
        for j in range(n):
            if i // len(grid) == j // len(grid):
                weight = math.exp(0.3) * (phi_query[i] * phi_key[j]).sum(-1) / M
                dx, dy = offset(i % len(grid), j % len(grid), grid)
                if abs(dx) + abs(dy) < 3:
                    weight = weight + ((query[i] * key[j]).sum(-1) / D**0.5 + table[:, dx + 2, dy + 2]).exp()
                weights = weights.index_put((torch.tensor(j),), weight)
        rows.append(torch.einsum("jh,jhe->he", weights, value) / weights.sum(0)[:, None])
    expected, inputs = torch.stack(rows), (query, key, value, table)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    direction = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad((out * direction).sum(), inputs),
        torch.autograd.grad((expected * direction).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("grid", [GRID, TORUS, PixelGrid((2, 3), 7)], ids=["grid", "torus", "all near"])
def test_clipped_equals_the_double_sum(on_device, grid, kernel):
    n, k = len(grid), int(grid.max_distance)
    query, value, table = double(n, HEADS, D), double(n, HEADS, E), double(HEADS, k + 1, D)
    projection = double(M, D)
    bins = grid.neighbours(device=on_device).bins(k)
    weights = distance_weights(query, table, projection, kernel, None)
    sums = ring_sums(value.flatten(1), bins)[:-1].view(n, k, HEADS, E)
    out = clipped_attention(value, weights, sums, bins.crow.diff()[:-1].view(n, k), Rows(n))
    if kernel == "softmax":
        features = [positive_features(t / D**0.25, projection) for t in (query, table)]
    else:
        features = [(t @ projection.T).relu() + 1e-3 for t in (query, table)]
    for i in range(n):
        distances = [min(sum(map(abs, offset(i, j, grid))), k) for j in range(n)]
        w = torch.einsum("hm,hjm->jh", features[0][i], features[1][:, distances])
        expected = torch.einsum("jh,jhe->he", w, value) / w.sum(0)[:, None]
        torch.testing.assert_close(out[i], expected, rtol=1e-11, atol=1e-12)


def test_clipped_stays_right_where_every_node_is_near():
    """The far table may be larger than all others by e^200: with no node far it must not be felt."""
    grid = PixelGrid((1, 2), 3)
    value, weights = torch.randn(2, 1, 3), torch.tensor([1e-20, 3e-20, 1e-20, 1.0]).expand(2, 1, 4)
    bins = grid.neighbours().bins(3)
    sums = ring_sums(value.flatten(1), bins)[:-1].view(2, 3, 1, 3)
    out = clipped_attention(value, weights, sums, bins.crow.diff()[:-1].view(2, 3), Rows(2))
    torch.testing.assert_close(out, (value + 3 * value.flip(0)) / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [1.0, 100.0])
def test_large_scores_stay_finite(norm):
    n = len(GRID)
    query, key = (norm * torch.nn.functional.normalize(torch.randn(n, HEADS, D), dim=-1) for _ in range(2))
    value, projection, near = torch.randn(n, HEADS, E), torch.randn(M, D), GRID.neighbours()
    query.requires_grad_()
    far = features_attention(query, key, value, projection, "softmax", None, Rows(n))
    far = far[0], far[1] + log_norm(query, "softmax", None, M)
    bias = 100 * torch.randn(HEADS, len(near.offsets))
    out = window_attention(query, key, value, bias, 100 * torch.randn(HEADS), far, near)
    weights = distance_weights(query, norm * torch.randn(HEADS, 4, D), projection, "softmax", None)
    for t in (out, *torch.autograd.grad(out.sum(), query), weights):
        assert t.isfinite().all()
    assert out.abs().max() <= value.abs().max() * (1 + 1e-5)  # means of values
    assert weights.min() > 0


def pattern(device="cpu"):
    near = PixelGrid((3, 5), 3).neighbours(device=device)
    return near.pattern, near.nodes


def test_products_over_pairs(on_device):
    p, n = pattern(on_device)
    query, key = double(2, n, 3), double(2, n, 3)
    expected = (query[:, p.row] * key[:, p.col]).sum(-1)
    torch.testing.assert_close(edge_ops.edge_dot(query, key, p.crow, p.col, p.back), expected)
    weight = double(2, len(p.col))
    expected = torch.zeros(2, n, 3).double().index_add(1, p.row, weight[..., None] * key[:, p.col])
    torch.testing.assert_close(edge_ops.edge_sum(weight, key, p.crow, p.col, p.back), expected)


@pytest.mark.parametrize("mkl", [True, False])
def test_products_gradcheck(mkl, monkeypatch):
    """With torch's sampled product, and without it, as on processors MKL does not support."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(edge_ops, "_CHUNK", 7)
    p, n = pattern()
    query, key, weight = (double(2, size, *rest).requires_grad_() for size, *rest in ((n, 3), (n, 3), (len(p.col),)))
    rest = (p.crow, p.col, p.back)
    assert torch.autograd.gradcheck(lambda q, k: edge_ops.edge_dot(q, k, *rest), (query, key))
    assert torch.autograd.gradcheck(lambda w, v: edge_ops.edge_sum(w, v, *rest), (weight, key))


def test_second_derivatives_are_refused():
    p, n = pattern()
    query, key = double(2, n, 3).requires_grad_(), double(2, n, 3)
    (grad,) = torch.autograd.grad(
        edge_ops.edge_dot(query, key, p.crow, p.col, p.back).square().sum(), query, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.square().sum().backward()


def test_registered_operators():
    p, n = pattern()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    query, key, weight = (double(2, *s).requires_grad_() for s in ((n, 3), (n, 3), (len(p.col),)))
    torch.library.opcheck(edge_ops.edge_dot, (query, key, p.crow, p.col, p.back), test_utils=checks)
    torch.library.opcheck(edge_ops.edge_sum, (weight, key, p.crow, p.col, p.back), test_utils=checks)


def test_no_pairs():
    near = PixelGrid((1, 1), 3).neighbours()
    query, key, value = torch.randn(3, 1, HEADS, D)
    far = features_attention(query, key, value, torch.randn(M, D), "softmax", None, Rows(1))
    out = window_attention(query, key, value, torch.zeros(HEADS, 0), torch.zeros(HEADS), far, near)
    torch.testing.assert_close(out, value)
