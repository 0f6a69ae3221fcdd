import math

import pytest
import torch

from tg_equiattn.groups import FiniteGroup, cyclic, dihedral, from_generators, icosahedral, mirror, octahedral, trivial

QUARTER = [[0.0, -1.0], [1.0, 0.0]]
ORDERS = [
    (trivial(2), 1), (trivial(3), 1), (mirror(), 2), (mirror(3), 2), (cyclic(3), 3), (cyclic(12), 12),
    (dihedral(1), 2), (dihedral(4), 8), (dihedral(7), 14), (octahedral(), 24), (octahedral(reflections=True), 48),
    (icosahedral(), 60), (from_generators([QUARTER]), 4), (from_generators([QUARTER, [[-1.0, 0.0], [0.0, 1.0]]]), 8),
]  # fmt: skip


@pytest.mark.parametrize(("group", "order"), ORDERS, ids=[repr(g) for g, _ in ORDERS])
def test_table_multiplies_matrices(group, order):
    m = group.matrices
    assert len(group) == order
    torch.testing.assert_close(m[group.cayley], m[:, None] @ m[None], rtol=0, atol=1e-12)
    torch.testing.assert_close(m[group.inverse], m.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(m[group.identity], torch.eye(group.dim, dtype=torch.float64))


@pytest.mark.parametrize(
    ("group", "count"), [(cyclic(8), 4), (dihedral(8), 8), (octahedral(), 24), (icosahedral(), 12)]
)
def test_lattice_elements_are_exact(group, count):
    exact = group.matrices[group.lattice]
    assert len(exact) == count
    assert torch.equal(exact, exact.round())
    assert not bool((exact.signbit() & (exact == 0)).any())


def test_single_precision_matrices_are_snapped():
    angles = torch.arange(4) * (math.pi / 2)
    rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    group = FiniteGroup(rows.float().view(4, 2, 2))
    assert bool(group.lattice.all())
    assert group == cyclic(4)


def test_default_device_does_not_matter():
    with torch.device("meta"):
        group = dihedral(4)
        assert len(from_generators(group.matrices)) == 8
    assert group == dihedral(4)
    assert group.cayley.device.type == "cpu"
