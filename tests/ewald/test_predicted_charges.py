"""Charges that are predicted: the formula by loops, sums, symmetries, and what is refused."""

import math

import pytest
import torch
from ewald import bonds
from space import error, motion

from tg_equiattn.functional import charge_energies
from tg_equiattn.nn import PredictedChargeInteraction

CUTOFF, COULOMB = 2.0, 14.3996454785


@pytest.fixture(autouse=True)
def _double(double):
    """In double precision."""


def layer(scalars=3, **options):
    torch.manual_seed(1)
    made = PredictedChargeInteraction(["A", "B"], width=0.8, scalars=scalars, cutoff=CUTOFF, **options)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=2.0)
        made.feature_size.uniform_(0.5, 1.5)
    return made


def cloud(nodes=8):
    torch.manual_seed(5)
    return torch.arange(nodes) % 2, 3 * torch.rand(nodes, 3), torch.randn(nodes, 3)


def call(made, elements, pos, features, charge, **options):
    return made(elements, pos, features=features, total_charge=torch.tensor([charge]), **bonds(pos, CUTOFF), **options)


def test_charges_are_the_formula():
    """By loops over nodes and edges."""
    made, (elements, pos, features) = layer(dielectric=4.0), cloud()
    out = call(made, elements, pos, features, 1.5)
    x = features / made.feature_size
    own = [0.1 * (made.constants[z] + made.linear(f) + made.perceptron(f)) for z, f in zip(elements, x, strict=True)]
    q, w = [o[0] for o in own], [torch.nn.functional.softplus(o[1]) + 0.01 for o in own]
    edges = bonds(pos, CUTOFF)
    moved = [torch.zeros(())] * 8
    for (i, j), vector in zip(edges["edge_index"].T.tolist(), edges["edge_vectors"], strict=True):
        fade = (1 - (vector.norm() / CUTOFF) ** 2) ** 3
        moved[j] = moved[j] + fade * (made.weights * (x[i] - x[j])).mean()
    missing = 1.5 / 2 - sum(q)
    charges = torch.stack([a + b + c / sum(w) * missing for a, b, c in zip(q, moved, w, strict=True)])
    assert error(out.charges, charges) < 1e-12
    assert error(out.shared[0], missing) < 1e-12
    assert error(out.charges.sum(), torch.tensor(0.75)) < 1e-12
    energies = charge_energies(charges, pos, width=0.8) - charges**2 / (math.sqrt(2 * math.pi) * 0.8)
    for (i, j), vector in zip(edges["edge_index"].T.tolist(), edges["edge_vectors"], strict=True):
        r = vector.norm()
        fade = 1 - 6 * (r / CUTOFF) ** 2 + 8 * (r / CUTOFF) ** 3 - 3 * (r / CUTOFF) ** 4
        energies[i] = energies[i] - charges[i] * charges[j] * torch.erf(r / (2**0.5 * 0.8)) / r * fade / 2
    assert error(out.energies, COULOMB * energies) < 1e-12
    made.exclude_near = False
    whole = call(made, elements, pos, features, 1.5).energies
    assert error(whole, COULOMB * charge_energies(charges, pos, width=0.8)) < 1e-12
    assert error(whole, out.energies) > 1e-2
    assert error(out.dipole[0], (charges[:, None] * pos).sum(0)) < 1e-12  # in open space transfers are no exception


def test_charges_of_zero_stay_zero():
    made, given = layer(), cloud()
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    energies = call(made, *given, 0.0).energies
    energies.sum().backward()
    assert not energies.any()
    assert not any(parameter.grad.any() for parameter in made.parameters())


def test_energies_are_smooth_at_the_cutoff():
    """Second derivatives of the energy of two nodes do not jump where their edge ends."""
    made, features = layer(), torch.randn(2, 3)

    def curvature(distance):
        x = torch.tensor(distance, requires_grad=True)
        pos = torch.zeros(2, 3).index_put((torch.tensor(1), torch.tensor(0)), x)
        energy = call(made, torch.tensor([0, 1]), pos, features, 1.0).energies.sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return torch.autograd.grad(slope, x)[0]

    inside, outside = (curvature(CUTOFF + shift) for shift in (-1e-8, 1e-8))
    assert error(inside, outside) < 1e-4
    assert error(curvature(CUTOFF - 0.1), outside) > 1e-3


def test_checkpoints_have_the_form():
    made = layer(exclude_near=False)
    state = made.state_dict()
    with pytest.raises(ValueError, match="with exclude_near=True, like this one, got False"):
        layer().load_state_dict(state)
    text = made.settings()
    del text["exclude_near"]
    made.settings = lambda: text  # as earlier states stored it
    layer(exclude_near=False).load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="with exclude_near=True, like this one, got False"):
        layer().load_state_dict(made.state_dict())


def test_energy_is_not_linear_in_the_total_charge():
    made, given = layer(), cloud()
    low, middle, high = (call(made, *given, charge).energies.sum() for charge in (-1.0, 0.0, 1.0))
    assert (low + high - 2 * middle).abs() > 1e-2


def test_an_external_field_pulls_at_the_dipole():
    """By differences of energies, in every direction; it turns with the positions. Graphs that repeat have none."""
    made, (elements, pos, features), r = layer(dielectric=4.0), cloud(), motion(reflect=True)
    field = torch.tensor([[0.3, -0.2, 0.5]])

    def energy(pos, field):
        return call(made, elements, pos, features, 1.0, external_field=field).energies.sum()

    plain = call(made, elements, pos, features, 1.0)
    assert error(energy(pos, field), plain.energies.sum() - 2 * (field[0] * plain.dipole[0]).sum()) < 1e-12
    assert error(energy(pos @ r.T, field @ r.T), energy(pos, field)) < 1e-12
    assert (energy(pos, field @ r.T) - energy(pos, field)).abs() > 1e-2
    assert torch.autograd.gradcheck(energy, (pos.requires_grad_(), field.requires_grad_()))
    cell, pos, field = {"cell": 30 * torch.eye(3)}, pos.detach(), field.detach()
    with pytest.raises(ValueError, match="external_field must be zero for graphs that repeat"):
        call(made, elements, pos, features, 1.0, external_field=field, **cell)
    call(made, elements, pos, features, 1.0, external_field=0 * field, **cell)
    with pytest.raises(ValueError, match=r"external_field must be floating point of shape \(1, 3\)"):
        call(made, elements, pos, features, 1.0, external_field=field[0])


@pytest.mark.parametrize("reflect", [False, True])
def test_symmetries(reflect):
    made, (elements, pos, features), r = layer(), cloud(), motion(reflect=reflect)
    out, other = call(made, elements, pos, features, 0.0), call(made, elements, pos @ r.T + 7.0, features, 0.0)
    assert error(other.energies, out.energies) < 1e-12
    assert error(other.charges, out.charges) < 1e-12
    assert error(other.dipole, out.dipole @ r.T) < 1e-11  # of neutral graphs, wherever they are
    moved = call(made, elements, pos @ r.T, features + 0.1, 0.0)
    assert error(moved.charges, out.charges) > 1e-3


def test_crystals():
    """A cell that is repeated, and atoms in other cells, change nothing per atom."""
    made, (elements, pos, features), cell = layer(), cloud(), 4.0 * torch.eye(3)

    def outputs(elements, pos, features, cell):
        shifts = torch.cartesian_prod(*3 * [torch.arange(-4.0, 5.0)]) @ cell
        vectors = pos[None, :, None] + shifts - pos[:, None, None]
        length = vectors.norm(dim=3)
        first, second, image = ((length > 0) & (length < CUTOFF)).nonzero().T
        edges = {"edge_index": torch.stack([first, second]), "edge_vectors": vectors[first, second, image]}
        return made(elements, pos, features=features, total_charge=torch.zeros(1), cell=cell, **edges)

    out = outputs(elements, pos, features, cell)
    twice = torch.cat([pos, pos + cell[0] - 3 * cell[1]])
    double = outputs(elements.repeat(2), twice, features.repeat(2, 1), cell * torch.tensor([[2.0], [1.0], [1.0]]))
    assert error(double.energies, out.energies.repeat(2)) < 1e-11
    assert error(double.charges, out.charges.repeat(2)) < 1e-12


def test_what_is_refused():
    made, (elements, pos, features) = layer(), cloud()
    with pytest.raises(ValueError, match="total_charge must be given for predicted charges, which sum to it, got None"):
        made(elements, pos, features=features, **bonds(pos, CUTOFF))
    with pytest.raises(ValueError, match="features must be given, since charges are learned from features and edges"):
        made(elements, pos, total_charge=torch.zeros(1), **bonds(pos, CUTOFF))
