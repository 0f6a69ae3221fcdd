"""The products over pairs that the window and strategy 2 rest on."""

import pytest
import torch
from clouds import double

from tg_equiattn.edges import CSR
from tg_equiattn.functional.edge_products import edge_dot, edge_sum, gathered_edge_dot
from tg_equiattn.grids import PixelGrid


def relation(device="cpu"):
    near = PixelGrid((3, 4), 2).neighbors(device=device)
    return near.csr, near.nodes


def often(device):
    """Of pairs given several times there may be more than there are rows times columns."""
    row, col = torch.arange(3).repeat_interleave(4), torch.tensor([1, 2, 1, 1, 0, 2, 2, 2, 0, 0, 1, 1])
    return CSR.from_sorted(row.to(device), col.to(device), 3, 3), 3


@pytest.mark.parametrize("pairs", [relation, often])
def test_products_over_pairs(on_device, pairs):
    p, n = pairs(on_device)
    query, key, weight = (double(2, *s).requires_grad_() for s in ((n, 5), (n, 5), (len(p.col),)))
    expected = (query[:, p.row] * key[:, p.col]).sum(-1)
    torch.testing.assert_close(edge_dot(query, key, p), expected)
    torch.testing.assert_close(gathered_edge_dot(query, key, p.row, p.col, chunk=7), expected)
    expected = torch.zeros(2, n, 5).double().index_add(1, p.row, weight[..., None] * key[:, p.col])
    torch.testing.assert_close(edge_sum(weight, key, p), expected)


@pytest.mark.parametrize("pairs", [relation, often])
@pytest.mark.parametrize("mkl", [True, False])
def test_gradcheck(mkl, pairs, monkeypatch):
    """With torch's sampled product, and without it, as on processors MKL does not support."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    p, n = pairs("cpu")
    query, key, weight = (double(2, size, *rest).requires_grad_() for size, *rest in ((n, 2), (n, 2), (len(p.col),)))
    for run, inputs in ((edge_dot, (query, key)), (edge_sum, (weight, key))):
        assert torch.autograd.gradcheck(lambda *x, run=run: run(*x, p), inputs)
        assert torch.autograd.gradgradcheck(lambda *x, run=run: run(*x, p), inputs, fast_mode=True)


def test_third_derivatives():
    """In the direction of the keys, of a sum of fourth powers of scores."""
    p, n = relation()
    query, key = double(2, n, 3).requires_grad_(), double(2, n, 3)
    total = edge_sum(edge_dot(query, key, p).pow(4), key, p).sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(total, query, create_graph=True)
        total = (slope * key).sum()
    score, step = ((x[:, p.row] * key[:, p.col]).sum(-1) for x in (query, key))
    torch.testing.assert_close(total, (24 * score * step**3 * key[:, p.col].sum(-1)).sum())
