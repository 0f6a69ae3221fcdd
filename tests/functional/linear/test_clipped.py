"""Strategy 2 against its naive double sum, dense, ragged and masked."""

import pytest
import torch
from oracles import positive_features

from tg_equiattn.functional import clipped_attention, sum_aggregation
from tg_equiattn.grids import PixelGrid

HEADS, D, E, M = 3, 5, 7, 11
GRIDS = {
    "grid": PixelGrid((5, 7), 3),
    "torus": PixelGrid((5, 7), 3, periodic=True),
    "all near": PixelGrid((2, 3), 7),
}


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def distance(i, j, grid):
    """Manhattan distance of two pixels, the shortest one on a torus."""
    height, width = grid.shape
    dx, dy = abs(j % width - i % width), abs(j // width - i // width)
    return min(dx, width - dx) + min(dy, height - dy) if grid.periodic else dx + dy


def by_definition(query, value, table, projection, grid, exists):
    """One row of queries (n, heads, d) of a grid, whose keys are the nodes that exist."""
    n, k = len(grid), table.shape[1] - 1
    phi_query, phi_table = (positive_features(t / D**0.25, projection) for t in (query, table))
    keys, out = [j for j in range(n) if exists[j]], []
    for i in range(n):
        distances = [min(distance(i, j, grid), k) for j in keys]
        w = torch.einsum("hm,hjm->jh", phi_query[i], phi_table[:, distances])
        mean = torch.einsum("jh,jhe->he", w, value[keys]) / w.sum(0)[:, None]
        out.append(mean if exists[i] else 0 * mean)
    return torch.stack(out)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_equals_the_double_sum(on_device, grid, masked):
    n, k = len(grid), int(grid.max_distance)
    query, value = (double(2, HEADS, n, width).requires_grad_() for width in (D, E))
    table, projection = double(HEADS, k + 1, D).requires_grad_(), double(M, D)
    near = grid.neighbors(2, on_device)
    mask = torch.rand(2, n) < 0.7 if masked else None
    exists = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    given = [torch.where(exists[:, None, :, None], t, torch.nan) for t in (query, value)]
    out = clipped_attention(*given, projection, table, near, mask=mask)
    rows = [t.transpose(1, 2) for t in (query, value)]
    expected = [by_definition(q, v, table, projection, grid, e) for q, v, e in zip(*rows, exists.tolist(), strict=True)]
    expected = torch.stack(expected).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    direction = torch.randn_like(out)
    grads = (torch.autograd.grad((t * direction).sum(), (query, value, table)) for t in (out, expected))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    if mask is None:
        flat, batch = [t.flatten(0, 1) for t in rows], torch.arange(2).repeat_interleave(n)
        ragged = clipped_attention(*flat, projection, table, near, batch=batch, batch_size=2)
        torch.testing.assert_close(ragged, expected.transpose(1, 2).flatten(0, 1), rtol=1e-11, atol=1e-12)


def test_stays_right_where_every_node_is_near():
    """The far row of the table may weigh more than all others by 1e20: with no node far it must not be felt."""
    near, projection = PixelGrid((1, 2), 3).neighbors(), torch.tensor([[1.0]])
    table = torch.tensor([1e-20, 3e-20, 1e-20, 1.0]).log()
    table = 1 - (1 - 2 * table).sqrt()  # of the two numbers w with w - w^2 / 2 as asked for, the lower one
    query, value = torch.zeros(2, 1, 1), torch.randn(2, 1, 3)
    out = clipped_attention(query, value, projection, table[None, :, None], near)
    torch.testing.assert_close(out, (value + 3 * value.flip(0)) / 4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [1.0, 100.0])
def test_large_scores_stay_finite(norm):
    grid = GRIDS["grid"]
    query = norm * torch.nn.functional.normalize(torch.randn(len(grid), HEADS, D), dim=-1)
    value, table = torch.randn(len(grid), HEADS, E), norm * torch.randn(HEADS, 4, D)
    inputs = query.requires_grad_(), table.requires_grad_()
    out = clipped_attention(query, value, torch.randn(M, D), table, grid.neighbors())
    for t in (out, *torch.autograd.grad(out.sum(), inputs)):
        assert t.isfinite().all()
    assert out.abs().max() <= value.abs().max() * (1 + 1e-4)  # means of values


def test_sum_aggregation_and_another(on_device):
    """The sums of a sparse relation, and a library's own in their place."""
    grid = GRIDS["grid"]
    near, calls = grid.neighbors(1, on_device), []

    def gathered(x, pattern):
        calls.append(x.shape)
        return x.new_zeros(len(pattern.crow) - 1, x.shape[1]).index_add(0, pattern.row, x[pattern.col])

    x = double(len(grid), E)
    torch.testing.assert_close(sum_aggregation(x, near.pattern), gathered(x, near.pattern))
    query, value, table, projection = double(35, HEADS, D), double(35, HEADS, E), double(HEADS, 4, D), double(M, D)
    expected = clipped_attention(query, value, projection, table, near)
    out = clipped_attention(query, value, projection, table, near, aggregate=gathered)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert calls[1:] == [(35, HEADS * E)]


NEAR = GRIDS["grid"].neighbors()
Q, W, TABLE = torch.ones(35, HEADS, D), torch.ones(M, D), torch.ones(HEADS, 4, D)


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("query and value must be", (Q, Q[:5], W, TABLE, NEAR), {}),
        ("projection must be", (Q, Q, W[:, :2], TABLE, NEAR), {}),
        (r"distance_table must be \(3, k \+ 1, 5\) .* got \(2, 4, 5\)", (Q, Q, W, TABLE[:2], NEAR), {}),
        ("distance_table must be", (Q, Q, W, TABLE[..., :2], NEAR), {}),
        ("distance_table must be", (Q, Q, W, TABLE[:, :1], NEAR), {}),
        ("distance_table must be", (Q, Q, W, TABLE[0], NEAR), {}),
        ("neighbors must be of 30 nodes", (Q[:30], Q[:30], W, TABLE, NEAR), {}),
        ("mask must be None", (Q, Q, W, TABLE, NEAR), {"mask": torch.ones(35, dtype=torch.bool)}),
        ("batch must be sorted", (Q, Q, W, TABLE, NEAR), {"batch": torch.arange(35).flip(0)}),
    ],
)  # fmt: skip
def test_bad_arguments(message, arguments, options):
    with pytest.raises(ValueError, match=message):
        clipped_attention(*arguments, **options)
