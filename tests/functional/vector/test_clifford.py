"""The geometric product against Pauli matrices, its equivariance, and its twenty grade paths."""

import pytest
import torch
from clouds import close, gradients
from oracles import grade, grade_paths, pauli_product
from space import error, flipped_sign, motion, move_multivectors

from tg_equiattn.functional.vector.clifford import PATHS, channelwise_product, geometric_product, product_tables
from tg_equiattn.testing import TOLERANCE


def test_equals_pauli_matrices(device):
    x, y = torch.randn(5, 1, 7, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    out = geometric_product(x.to(device), y.to(device))
    torch.testing.assert_close(out.cpu(), pauli_product(x, y), rtol=1e-13, atol=1e-13)


def test_basis_blades():
    blades = torch.eye(8)
    one, e1, e2, e3, e23, e31, e12, e123 = blades
    for a, b, expected in [
        (e1, e1, one), (e2, e3, e23), (e3, e1, e31), (e1, e2, e12), (e1, e23, e123), (e12, e12, -one),
        (e23, e31, -e12), (e123, e123, -one), (e3, e2, -e23), (e123, e2, e31),
    ]:  # fmt: skip
        torch.testing.assert_close(geometric_product(a, b), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, reflect, device):
    x, y = torch.randn(2, 17, 8, dtype=dtype, device=device)
    r = motion(dtype, reflect, device)
    got = geometric_product(move_multivectors(x, r), move_multivectors(y, r))
    assert error(got, move_multivectors(geometric_product(x, y), r)) <= TOLERANCE[dtype]


def test_a_wrong_sign_is_seen():
    x, y = torch.randn(2, 17, 8, dtype=torch.float64)
    r = motion()
    with flipped_sign():
        got = geometric_product(move_multivectors(x, r), move_multivectors(y, r))
        assert error(got, move_multivectors(geometric_product(x, y), r)) > 1e-2
        assert error(geometric_product(x, y), pauli_product(x, y)) > 1e-2
    assert error(geometric_product(x, y), pauli_product(x, y)) < 1e-12


def test_bivectors_are_not_polar():
    """The action of a reflection that forgets that bivectors are axial is not one the product respects."""
    x, y = torch.randn(2, 17, 8, dtype=torch.float64)
    r = motion(reflect=True)

    def polar(x):
        return torch.cat([x[..., :1], x[..., 1:4] @ r.T, x[..., 4:7] @ r.T, x[..., 7:]], -1)

    assert error(geometric_product(polar(x), polar(y)), polar(geometric_product(x, y))) > 1e-2


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
