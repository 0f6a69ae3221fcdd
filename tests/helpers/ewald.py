"""Energies of crystals in three ways that share nothing with the studies' data: Ewald's two sums, a sum over images."""

import itertools
import math

import torch


def lattice(cell, reach):
    """All lattice vectors shorter than ``reach``, the zero among them, (L, 3)."""
    counts = [math.ceil(reach * float(row.norm())) for row in torch.linalg.inv(cell).T]
    numbers = torch.tensor(list(itertools.product(*(range(-n, n + 1) for n in counts))), dtype=cell.dtype)
    vectors = numbers @ cell
    return vectors[vectors.norm(dim=1) < reach]


def two_sums(charges, positions, cell, softness, splitting):
    """Energy of a cell of Gaussian charges, of point charges where ``softness`` is 0; sums over images of what is left
    of erf(r / 2 softness) / r less erf(splitting r) / r, and over waves of the latter."""
    pair = torch.zeros((), dtype=torch.float64)
    images = lattice(cell, 6.5 / splitting + 2 * float(cell.norm()))

    def near(r):
        soft = torch.erf(r / (2 * softness)) if softness else torch.ones_like(r)
        return (soft - torch.erf(splitting * r)) / r

    for i, j in itertools.product(range(len(charges)), repeat=2):
        r = (positions[i] - positions[j] + images).norm(dim=1)
        pair = pair + charges[i] * charges[j] / 2 * near(r[r > 0] if i == j else r).sum()
    inverse = torch.linalg.inv(cell)
    waves = 2 * math.pi * lattice(inverse.T.contiguous(), 13 * splitting / (2 * math.pi))
    square = waves.square().sum(1)
    waves, square = waves[square > 0], square[square > 0]
    structure = (charges * torch.exp(1j * (waves @ positions.T))).sum(1).abs().square()
    far = 2 * math.pi / torch.linalg.det(cell).abs() * ((-square / (4 * splitting**2)).exp() / square * structure).sum()
    return pair + far - splitting / math.sqrt(math.pi) * charges.square().sum()


def over_images(charges, positions, cell, softness, reach):
    """The same by adding up all pairs of a cell with its images no farther than ``reach``, whole cells in a sphere: in
    the limit that of Ewald for cells without a dipole."""
    images, total = lattice(cell, reach), torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(len(charges)), repeat=2):
        r = (positions[i] - positions[j] + images).norm(dim=1)
        r = r[r > 0] if i == j else r
        total = total + charges[i] * charges[j] / 2 * (torch.erf(r / (2 * softness)) / r).sum()
    return total


def rock_salt():
    """Charges, positions, the cubic cell and the nearest distance in sodium chloride."""
    places = torch.tensor(list(itertools.product(range(2), repeat=3)), dtype=torch.float64)
    return 1 - 2 * (places.sum(1) % 2), places, 2 * torch.eye(3, dtype=torch.float64), 1.0


def caesium_chloride():
    """Charges, positions, the cubic cell and the nearest distance in caesium chloride."""
    places = torch.tensor([[0.0, 0, 0], [0.5, 0.5, 0.5]], dtype=torch.float64)
    return torch.tensor([1.0, -1.0]).double(), places, torch.eye(3, dtype=torch.float64), math.sqrt(3) / 2


ROCK_SALT, CAESIUM_CHLORIDE = 1.7475645946331822, 1.76267477307099  # Madelung's constants, for the nearest distance
