"""The geometric product against Pauli matrices, and its twenty grade paths."""

import itertools

import pytest
import torch
from clouds import close, gradients
from oracles import grade, grade_paths, pauli_product

from tg_equiattn.functional.vector.clifford import (
    GRADE_OF,
    GRADE_SIZES,
    PATHS,
    channelwise_product,
    geometric_product,
    geometric_product_definition,
    grades_of_products,
)

SOME_GRADES = [some for count in range(1, 5) for some in itertools.combinations(range(4), count)]


def test_equals_pauli_matrices(device):
    x, y = torch.randn(5, 1, 7, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    out = geometric_product(x.to(device), y.to(device))
    torch.testing.assert_close(out.cpu(), pauli_product(x, y), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(out.cpu(), geometric_product_definition(x, y), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("grades", SOME_GRADES)
def test_paths_and_their_weights(grades):
    """Of multivectors of all grades and of some: what is not there is zero."""
    assert list(PATHS) == grade_paths()
    assert len(PATHS) == 20
    present, made = ([n for n in range(8) if GRADE_OF[n] in some] for some in (grades, grades_of_products(grades)))
    x, y = (torch.randn(11, 3, len(present)).double().requires_grad_() for _ in range(2))
    weight = torch.randn(20, 3).double().requires_grad_()

    def among_zeros(z):
        return torch.zeros(11, 3, 8).double().index_copy(-1, torch.tensor(present), z)

    def parts(z):
        return [p if g in grades else p[:, :0] for g, p in enumerate(z.permute(2, 1, 0).split(GRADE_SIZES))]

    got = channelwise_product(weight, *(parts(among_zeros(z)) for z in (x, y)))
    got = torch.cat([part for part in got if part.shape[1]])
    full = [among_zeros(z) for z in (x, y)]
    expected = sum(
        w[:, None] * grade(pauli_product(grade(full[0], i), grade(full[1], k)), j)
        for w, (i, k, j) in zip(weight, PATHS, strict=True)
    )
    assert not expected[..., [n for n in range(8) if n not in made]].any()
    got, expected = got.permute(2, 1, 0), expected[..., made]
    close(*([z, *gradients([z], (x, y, weight))] for z in (got, expected)))
