"""The geometric product against Pauli matrices, and its twenty grade paths."""

import torch
from clouds import close, gradients
from oracles import grade, grade_paths, pauli_product

from tg_equiattn.functional.vector.clifford import PATHS, channelwise_product, geometric_product, product_tables


def test_equals_pauli_matrices(device):
    x, y = torch.randn(5, 1, 7, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    out = geometric_product(x.to(device), y.to(device))
    torch.testing.assert_close(out.cpu(), pauli_product(x, y), rtol=1e-13, atol=1e-13)


def test_paths_and_their_weights():
    assert list(PATHS) == grade_paths()
    assert len(PATHS) == 20
    x, y = (torch.randn(11, 3, 8).double().requires_grad_() for _ in range(2))
    weight = torch.randn(20, 3).double().requires_grad_()
    got = channelwise_product(*(z.permute(2, 1, 0) for z in (x, y)), weight).permute(2, 1, 0)
    expected = sum(
        w[:, None] * grade(pauli_product(grade(x, i), grade(y, k)), j)
        for w, (i, k, j) in zip(weight, PATHS, strict=True)
    )
    close(*([z, *gradients([z], (x, y, weight))] for z in (got, expected)))


def test_tables_first_used_in_inference_mode():
    """What was made under inference mode must be good for training."""
    product_tables.cache_clear()
    x = torch.randn(3, 8)
    with torch.inference_mode():
        geometric_product(x, x)
    x.requires_grad_()
    geometric_product(x, x).sum().backward()
    assert x.grad.isfinite().all()
