"""The geometric product against Pauli matrices."""

import pytest
import torch
from oracles import pauli_product

from tg_equiattn.functional import geometric_product

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")


def test_equals_pauli_matrices(device):
    x, y = torch.randn(5, 1, 7, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    out = geometric_product(x.to(device), y.to(device))
    torch.testing.assert_close(out.cpu(), pauli_product(x, y), rtol=1e-13, atol=1e-13)
