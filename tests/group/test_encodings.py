import itertools

import pytest
import torch
from oracles import relation_argument
from small_groups import GROUPS

from tg_equiattn.group.encodings import ENCODINGS, INDEXED, GroupEncoding, relation_index
from tg_equiattn.groups import cyclic


@pytest.mark.parametrize("relation", INDEXED)
@pytest.mark.parametrize("name", ["C4", "D4", "D2", "mirror"])
def test_relation_index(name, relation):
    group = GROUPS[name]
    index = relation_index(group, relation)
    for h, t, s in itertools.product(range(len(group)), repeat=3):
        expected = relation_argument(group.matrices, relation, h, t, s)
        assert (index[t, s] if relation == "relative" else index[h, t, s]) == expected


@pytest.mark.parametrize("encoding", list(ENCODINGS))
@pytest.mark.parametrize("n", [3, 6, 8])
def test_off_lattice_elements(n, encoding, randomise):
    """rho((gh)^-1 g D) = rho(h^-1 D) for rotations that no pixel grid has, on continuous offsets."""
    group = cyclic(n)
    module = randomise(GroupEncoding(encoding, 2, 7, n)).double()
    offsets = torch.randn(11, 2, dtype=torch.float64)

    def encode(points):
        return module(torch.einsum("hyx,ny->hnx", group.matrices, points))[0]

    expected = encode(offsets)
    for g in range(n):
        moved = encode(offsets @ group.matrices[g].T)[group.cayley[g]]
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-10)
        if g != group.identity:  # negative control: without relabelling the elements it must fail
            assert (encode(offsets @ group.matrices[g].T) - expected).abs().max() > 1e-2
