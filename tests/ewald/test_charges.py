"""Charges of elements and transfers: sums by loops, dipoles, Born charges, symmetries, and what is refused."""

import pytest
import torch
from ewald import bonds
from space import error, motion

from tg_equiattn.functional import charge_energies
from tg_equiattn.nn import ChargeInteraction

CHARGES = {"A": 0.9, "B": -0.3}
CUTOFF = 2.0
CELL = torch.tensor([[3.1, 0.2, 0.1], [0.3, 3.6, -0.2], [-0.4, 0.5, 2.9]], dtype=torch.float64)
SLAB = torch.tensor([True, True, False])


@pytest.fixture(autouse=True)
def _double(double):
    """In double precision."""


def layer(**options):
    made = ChargeInteraction(CHARGES, width=0.8, scalars=3, cutoff=CUTOFF, avg_num_neighbors=3.0, **options)
    with torch.no_grad():
        made.weights.normal_()
        made.scale.fill_(1.2)
        made.feature_size.fill_(0.7)
    return made


def cloud(repeat=1):
    """Elements, positions and features of a neutral cell, repeated along its first vector."""
    torch.manual_seed(5)
    elements, pos, features = torch.tensor([0, 1, 1, 1] * 2), 3 * torch.rand(8, 3), torch.randn(8, 3)
    places = torch.cat([pos + n * CELL[0] for n in range(repeat)])
    return elements.repeat(repeat), places, features.repeat(repeat, 1)


def call(made, elements, pos, features, cell=None, pbc=None):
    own = {} if cell is None else {"cell": cell, "pbc": torch.ones(3, dtype=torch.bool) if pbc is None else pbc}
    near = bonds(pos, CUTOFF, cell, [True] * 3 if pbc is None else pbc.tolist())
    return made(elements, pos, features=features, **near, **own)


def test_charges_and_dipoles_are_sums_over_edges():
    """By loops: a transfer takes from one node what it gives to the other, along the vector between them."""
    made, (elements, pos, features) = layer(), cloud()
    out = call(made, elements, pos, features, CELL)
    charges = [1.2 * (0.9, -0.3)[z] for z in elements]
    dipole = sum(q * x for q, x in zip(charges, pos, strict=True))
    near = bonds(pos, CUTOFF, CELL)
    for (i, j), vector in zip(near["edge_index"].T.tolist(), near["edge_vectors"], strict=True):
        own = (made.weights.detach() * (features[i] - features[j])).mean() / 0.7
        moved = (1 - (vector.norm() / CUTOFF) ** 2) ** 3 / 3.0 * own
        charges[j] = charges[j] + moved
        dipole = dipole + moved * vector / 2  # each pair has two edges
    assert error(out.charges, torch.stack(charges)) < 1e-12
    assert error(out.dipole[0], dipole) < 1e-12
    assert abs(out.charges.sum()) < 1e-12
    energies = charge_energies(out.charges, pos, width=0.8, cell=CELL)
    assert error(out.energies, 14.3996454785 * energies) < 1e-12


@pytest.mark.parametrize("pbc", [None, SLAB])
def test_born_charges(pbc):
    """Derivatives of the dipole; they sum to zero and do not see wrapping or an origin. A dipole of charges times
    wrapped positions does."""
    made, (elements, pos, features) = layer(dielectric=2.25), cloud()

    def born(pos, wrong=False):
        pos = pos.clone().requires_grad_()
        out = call(made, elements, pos, features, CELL, pbc)
        dipole = (out.charges[:, None] * pos).sum(0, keepdim=True) if wrong else out.dipole
        return made.born_charges(dipole, pos)

    found = born(pos)
    step = torch.zeros(8, 3)
    step[2, 1] = 1e-5
    more, less = (call(made, elements, pos + sign * step, features, CELL, pbc).dipole[0] for sign in (1, -1))
    assert error(found[2, :, 1], 1.5 * (more - less) / 2e-5) < 1e-6
    assert found.sum(0).abs().max() < 1e-12
    along = torch.randint(-1, 2, (8, 3)).double() * (torch.ones(3) if pbc is None else pbc)
    assert error(born(pos + along @ CELL + 4.0), found) < 1e-11
    assert error(born(pos + along @ CELL, wrong=True), born(pos, wrong=True)) > 1e-3
    assert born(pos, wrong=True).sum(0).abs().max() < 1e-12


def test_born_charges_can_be_trained_on():
    made, (elements, pos, features) = layer(), cloud()
    pos.requires_grad_()
    found = made.born_charges(call(made, elements, pos, features, CELL).dipole, pos, create_graph=True)
    slopes = torch.autograd.grad(found.square().sum(), [made.weights, made.scale])
    assert all(x.abs().max() > 1e-3 for x in slopes)


@pytest.mark.parametrize("reflect", [False, True])
def test_symmetries(reflect):
    made, (elements, pos, features), r = layer(), cloud(), motion(reflect=reflect)
    out, other = call(made, elements, pos, features, CELL), call(made, elements, pos @ r.T, features, CELL @ r.T)
    assert error(other.energies, out.energies) < 1e-12
    assert error(other.charges, out.charges) < 1e-12
    assert error(other.dipole, out.dipole @ r.T) < 1e-12
    double = call(made, *cloud(2), CELL * torch.tensor([[2.0], [1.0], [1.0]]))
    assert error(double.energies, out.energies.repeat(2)) < 1e-12
    assert error(double.charges, out.charges.repeat(2)) < 1e-12


def test_fragments_keep_their_charges():
    """Transfers do not see beyond edges: what is far changes no charge, and neutral fragments stay neutral."""
    made, (elements, pos, features) = layer(), cloud()
    out = call(made, elements, pos, features)
    both = call(made, elements.repeat(2), torch.cat([pos, pos @ motion().T + 30.0]), features.repeat(2, 1))
    assert error(both.charges, out.charges.repeat(2)) < 1e-12
    assert both.charges[:8].sum().abs() < 1e-12


def test_a_layer_without_scalars_holds_its_charges():
    made, (elements, pos, _) = ChargeInteraction(CHARGES, width=0.8), cloud()
    assert list(made.parameters()) == []
    assert torch.equal(made(elements, pos).charges, torch.tensor([0.9, -0.3])[elements])
    new = ChargeInteraction(CHARGES, width=0.8, scalars=3, cutoff=CUTOFF)
    assert torch.equal(call(new, *cloud()).charges, made(elements, pos).charges)


def test_what_is_refused():
    made, (elements, pos, features) = layer(), cloud()
    near = bonds(pos, CUTOFF)
    with pytest.raises(ValueError, match="features must be given, since charges are learned from features and edges"):
        made(elements, pos, **near)
    with pytest.raises(ValueError, match=r"graph 0 they sum to 0\.9, and no total_charge is given"):
        made(elements[:1], pos[:1], features=features[:1], **bonds(pos[:1], CUTOFF))
    with pytest.raises(ValueError, match=r"graph 0 they sum to 0\.9, and total_charge is 2"):
        made(elements[:1], pos[:1], features=features[:1], total_charge=torch.tensor([2.0]), **bonds(pos[:1], CUTOFF))
    with pytest.raises(ValueError, match="cutoff must be given with scalars, got None"):
        ChargeInteraction(CHARGES, width=1.0, scalars=2)
    with pytest.raises(ValueError, match="charges must be a dictionary of numbers, got"):
        ChargeInteraction({"Na": "x"}, width=1.0)


@pytest.mark.parametrize("cell", [None, CELL])
def test_edges_must_be_in_both_directions(cell):
    """One edge of a full list is enough, and so is an image; a ring of edges balances at every node and is no list."""
    made, (elements, pos, features) = layer(), cloud()
    own, near = {"features": features} | ({} if cell is None else {"cell": cell}), bonds(pos, CUTOFF, cell)
    index, vectors = near["edge_index"], near["edge_vectors"]
    made(elements, pos, **own, **near)
    made(elements, pos, **own, edge_index=index.flip(1), edge_vectors=vectors.flip(0))
    lengths = vectors.norm(dim=1)
    for kept in (index[0] < index[1], torch.arange(len(lengths)) != int(lengths.argmin())):
        with pytest.raises(ValueError, match=r"edge_index must have each edge in both directions.*\d edges from node"):
            made(elements, pos, **own, edge_index=index[:, kept], edge_vectors=vectors[kept])
    with pytest.raises(ValueError, match=r"edge_vectors must be pos\[edge_index\[1\]\] - pos"):
        made(elements, pos, **own, edge_index=index, edge_vectors=-vectors)
    nodes = torch.tensor([0.0, 120.0, 240.0]).deg2rad()
    pos, ring = torch.stack([nodes.cos(), nodes.sin(), 0 * nodes], 1), torch.tensor([[0, 1, 2], [1, 2, 0]])
    options = {"features": features[:3], "total_charge": torch.tensor([0.3])}
    with pytest.raises(ValueError, match="edge_index must have each edge in both directions"):
        made(elements[:3], pos, **options, edge_index=ring, edge_vectors=pos[ring[1]] - pos[ring[0]])


def test_inputs_that_would_be_broadcast_or_misread():
    made, (elements, pos, features), batch = layer(), cloud(), torch.tensor([0] * 4 + [1] * 4)
    near = bonds(pos, CUTOFF)
    within = batch[near["edge_index"][0]] == batch[near["edge_index"][1]]
    given = {"edge_index": near["edge_index"][:, within], "edge_vectors": near["edge_vectors"][within]}
    given["features"] = features
    made(elements, pos, batch, **given)
    for wrong, match in (
        ({"total_charge": torch.zeros(1)}, r"total_charge must be real numbers of shape \(2,\).*shape \(1,\)"),
        ({"total_charge": torch.zeros(())}, r"total_charge must be .* got .* shape \(\)"),
        ({"total_charge": torch.full((2,), torch.nan)}, "total_charge must be finite"),
        ({"edge_vectors": given["edge_vectors"][:1]}, "edge_vectors must be real numbers of shape"),
        ({"features": features[:1]}, r"features must be floating point of shape \(8, 3\), got .*\(1, 3\)"),
        (near, "edge_index must not join nodes of different graphs"),
        ({"elements": elements + 10}, r"elements must be in \[0, 1\], the numbers of A, B in this layer, got 10 to 11"),
        ({"elements": elements.double()}, "elements must be int64"),
    ):
        with pytest.raises(ValueError, match=match):
            made(**{"elements": elements, "pos": pos, "batch": batch} | given | wrong)
