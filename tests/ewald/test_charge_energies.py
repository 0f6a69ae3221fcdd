"""Energies of charges: against double sums, sums of squares over waves, torch-pme, and known numbers."""

import itertools
import math

import ewald
import pytest
import torch
from space import batch_of, error, motion

from tg_equiattn.functional import charge_energies

WIDTH = 0.9
CELL = torch.tensor([[5.1, 0.2, 0.1], [0.3, 5.6, -0.2], [-0.4, 0.5, 4.9]], dtype=torch.float64)
SLAB = torch.tensor([True, True, False])
SYSTEMS = {"open": {}, "slab": {"cell": CELL, "pbc": SLAB}, "crystal": {"cell": CELL}}
WIDE = {
    "cubic": {"cell": 30 * torch.eye(3, dtype=torch.float64)},
    "triclinic": {"cell": torch.tensor([[24.0, 2, 4], [6, 26, -4], [-8, 10, 32]], dtype=torch.float64)},
    "flat": {"cell": torch.tensor([[12.0, 0, 0], [1, 12, 0], [0, 0, 90]], dtype=torch.float64)},
}
METHODS = [("open", "ewald"), ("open", "nufft"), ("slab", "nufft"), ("crystal", "nufft")]
METHODS += [(name, "auto") for name in WIDE]
pytestmark = pytest.mark.filterwarnings("ignore:cell of graph 0 is far wider")


@pytest.fixture(autouse=True)
def _skip_without_finufft(request):
    if "nufft" in request.node.name:
        pytest.importorskip("finufft")


def ions(count=7):
    charges = torch.randn(count, dtype=torch.float64)
    return charges - charges.mean(), 3 * torch.rand(count, 3, dtype=torch.float64)


def double_sum(charges, pos):
    """The textbook's sum over pairs of an open graph, and the terms of nodes themselves."""
    total = 0.0
    for i, j in itertools.product(range(len(charges)), repeat=2):
        r = (pos[i] - pos[j]).norm()
        near = math.sqrt(2 / math.pi) / WIDTH if i == j else torch.erf(r / (math.sqrt(2) * WIDTH)) / r
        total = total + 0.5 * charges[i] * charges[j] * near
    return total


def squares(charges, pos, cell):
    """Sum over reciprocal vectors of |structure factor|²."""
    numbers = torch.cartesian_prod(*[torch.arange(-9.0, 10.0, dtype=torch.float64)] * 3)
    k = 2 * math.pi * numbers[numbers.any(1)] @ torch.linalg.inv(cell).T
    phase, length = pos @ k.T, k.norm(dim=1)
    square = (charges @ phase.cos()) ** 2 + (charges @ phase.sin()) ** 2
    return (
        2
        * math.pi
        / torch.linalg.det(cell).abs()
        * (square * torch.exp(-((length * WIDTH) ** 2) / 2) / length**2).sum()
    )


@pytest.mark.parametrize("method", ["direct", "ewald", "nufft"])
def test_open_graphs_are_double_sums(method):
    charges, pos = ions()
    charges = charges + 0.3  # a charged one
    found = charge_energies(charges, pos, width=WIDTH, method=method, error=1e-10)
    assert error(found.sum(), double_sum(charges, pos)) < (1e-12 if method == "direct" else 1e-9)


@pytest.mark.parametrize("method", ["ewald", "nufft"])
@pytest.mark.parametrize("extra", [0.0, 0.2])
def test_crystals_are_sums_of_squares(method, extra):
    charges, pos = ions()
    found = charge_energies(charges + extra, pos, width=WIDTH, cell=CELL, method=method, error=1e-12)
    assert error(found.sum(), squares(charges + extra, pos, CELL)) < 1e-10


def test_known_numbers():
    """Madelung's constant of rock salt, and that of a charge in a cubic cell with a background (Wigner)."""
    charges, pos, cell, nearest = ewald.rock_salt()
    own = charges.square().sum() / (math.sqrt(2 * math.pi) * 0.12)
    found = charge_energies(charges.double(), pos, width=0.12, cell=cell, error=1e-10).sum() - own
    assert abs(float(found) / 4 * nearest + ewald.ROCK_SALT) < 1e-7
    one, width, side = torch.ones(1, dtype=torch.float64), 0.5, 7.0
    found = charge_energies(one, torch.zeros(1, 3), width=width, cell=side * torch.eye(3).double(), error=1e-10)
    smeared = 1 / (math.sqrt(2 * math.pi) * width) + math.pi * width**2 / side**3
    assert abs(float(found) - smeared + 2.837297479 / (2 * side)) < 1e-8


@pytest.mark.parametrize("system", SYSTEMS)
def test_energies_are_never_negative(system):
    """With any charges, neutral ones in slabs; without the nodes themselves they would be."""
    negative = 0
    for _ in range(20):
        charges, pos = ions()
        charges = charges if system == "slab" else charges + torch.randn(1)
        found = charge_energies(charges, pos, width=WIDTH, **SYSTEMS[system]).sum()
        assert found > 0
        negative += found < charges.square().sum() / (math.sqrt(2 * math.pi) * WIDTH)
    assert negative > 0


def derivatives(system, method, promised=1e-9):
    """An energy, its slopes by charges, positions and cells along random directions, and second derivatives."""
    torch.manual_seed(7)
    charges, pos = ions(5)
    given = (SYSTEMS | WIDE)[system]
    inputs = [charges, pos, *([given["cell"]] if given else [])]
    along, probe = [torch.randn_like(x) for x in inputs], torch.randn(5, dtype=torch.float64)

    def energy(step):
        moved = [x + step * a for x, a in zip(inputs, along, strict=True)]
        own = given | ({"cell": moved[2]} if given else {})
        return (probe * charge_energies(*moved[:2], width=WIDTH, method=method, error=promised, **own)).sum()

    def slopes(step):
        step = torch.tensor(float(step), dtype=torch.float64, requires_grad=True)
        slope = torch.autograd.grad(energy(step), step, create_graph=True)[0]
        return slope, torch.autograd.grad(slope, step)[0]

    return energy, slopes


DIFFERENCES = [("open", "direct"), ("slab", "ewald"), ("crystal", "ewald"), ("triclinic", "auto"), ("flat", "auto")]


@pytest.mark.parametrize(("system", "method"), DIFFERENCES)
def test_derivatives_are_differences(system, method):
    energy, slopes = derivatives(system, method)
    slope, bend = slopes(0.0)
    assert error(slope, (energy(1e-4) - energy(-1e-4)) / 2e-4) < 1e-5
    assert error(bend, (slopes(1e-4)[0] - slopes(-1e-4)[0]) / 2e-4) < 1e-5


@pytest.mark.parametrize(("system", "method"), METHODS)
def test_methods_agree_to_what_they_promise(system, method):
    """In energies, slopes and second derivatives."""
    exact = derivatives(system, "direct" if system == "open" else "ewald")
    energy, slopes = derivatives(system, method, 1e-5)
    assert error(energy(0.0), exact[0](0.0)) < 1e-4
    assert error(slopes(0.0), exact[1](0.0)) < 1e-4


@pytest.mark.parametrize("system", SYSTEMS)
def test_symmetries(system):
    """Rotations, reflections, another origin, nodes in other cells, and supercells."""
    (charges, pos), own = ions(), SYSTEMS[system]
    wanted, r = charge_energies(charges, pos, width=WIDTH, **own), motion(reflect=True)
    turned = {name: x @ r.T if name == "cell" else x for name, x in own.items()}
    assert error(charge_energies(charges, pos @ r.T + 40.0, width=WIDTH, **turned), wanted) < 1e-12
    if own:
        along = torch.randint(-3, 4, (7, 3)).double() * (own.get("pbc", torch.ones(3)) != 0)
        assert error(charge_energies(charges, pos + along @ CELL, width=WIDTH, **own), wanted) < 1e-12
        double = own | {"cell": CELL * torch.tensor([[2.0], [1.0], [1.0]])}
        both = charge_energies(charges.repeat(2), torch.cat([pos, pos + CELL[0]]), width=WIDTH, **double)
        assert error(both, wanted.repeat(2)) < 1e-12
    assert error(charge_energies(charges, pos * 1.01, width=WIDTH, **own), wanted) > 1e-4


def test_more_pairs_and_waves_than_a_tile_has():
    """A cloud is its double sum, forces too, and a supercell of 64 cells is as its cell."""
    charges, pos = torch.randn(1500, dtype=torch.float64), 20 * torch.rand(1500, 3, dtype=torch.float64)
    first, second = torch.combinations(torch.arange(1500)).T
    r = torch.pdist(pos.requires_grad_())
    wanted = (charges[first] * charges[second] * torch.erf(r / (math.sqrt(2) * WIDTH)) / r).sum()
    found = charge_energies(charges, pos, width=WIDTH, method="direct").sum()
    assert error(found, wanted + charges.square().sum() / (math.sqrt(2 * math.pi) * WIDTH)) < 1e-12
    assert error(*(torch.autograd.grad(x, pos)[0] for x in (found, wanted))) < 1e-11
    (charges, pos), steps = ions(), torch.cartesian_prod(*[torch.arange(4.0, dtype=torch.float64)] * 3)
    places = (pos + (steps @ CELL)[:, None]).flatten(0, 1)
    own = {"width": WIDTH, "method": "ewald"}
    many = charge_energies(charges.repeat(64), places, cell=4 * CELL, **own)
    assert error(many, charge_energies(charges, pos, cell=CELL, **own).repeat(64)) < 1e-12


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("promised", [1e-4, 1e-10])
def test_molecules_in_wide_cells(name, promised):
    """Sums over images are those over reciprocal vectors, also for charged molecules, nodes in other cells, and another
    origin."""
    (charges, pos), own = ions(), WIDE[name] | {"width": WIDTH, "error": promised}
    charges = charges + 0.3
    wanted = charge_energies(charges, pos, method="ewald", **own | {"error": 1e-12})
    found = charge_energies(charges, pos, **own)
    assert 0 < error(found, wanted) < promised
    assert not torch.equal(found, charge_energies(charges, pos, method="ewald", **own))
    wrapped = pos + torch.randint(-3, 4, (7, 3)).double() @ own["cell"] + 5.3
    assert error(charge_energies(charges, wrapped, **own), found) < 1e-12
    at_a_face = pos - pos[:1] + torch.tensor([[0.5, 0, 0]], dtype=torch.float64) @ own["cell"]
    both = torch.cat([pos[:1] * 0, at_a_face]), torch.cat([charges[:1], charges])
    sides = [charge_energies(both[1], both[0] + torch.tensor([x, 0, 0]), **own) for x in (1e-9, -1e-9)]
    assert error(sides[0], sides[1]) < promised


def test_batches_that_mix_boxes_crystals_and_molecules():
    charges, pos, sizes = torch.randn(24, dtype=torch.float64), 3 * torch.rand(24, 3, dtype=torch.float64), [5, 7, 6, 6]
    cell = torch.stack([WIDE["cubic"]["cell"], CELL, CELL, WIDE["triclinic"]["cell"]])
    batch, pbc = batch_of(sizes), torch.tensor([[True] * 3, [True] * 3, [False] * 3, [True] * 3])
    together = charge_energies(charges, pos, batch, width=WIDTH, cell=cell, pbc=pbc)
    for n in range(4):
        here = batch == n
        alone = charge_energies(charges[here], pos[here], width=WIDTH, cell=cell[n], pbc=pbc[n])
        assert error(together[here], alone) < 1e-12
