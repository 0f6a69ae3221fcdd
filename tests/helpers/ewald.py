"""Energies of crystals, torch-pme's and known ones, and kernels as users bring them."""

import itertools
import math

import torch

from tg_equiattn.ewald.cells import cells_of
from tg_equiattn.ewald.ewald_attention import ewald_attention
from tg_equiattn.ewald.kernels import Interaction, Product
from tg_equiattn.functional import Kernel
from tg_equiattn.graphs.node_batch import NodeBatch


def lattice(cell, reach):
    """All lattice vectors shorter than ``reach``, the zero among them, (L, 3)."""
    counts = [math.ceil(reach * float(row.norm())) for row in torch.linalg.inv(cell).T]
    numbers = torch.tensor(list(itertools.product(*(range(-n, n + 1) for n in counts))), dtype=cell.dtype)
    vectors = numbers @ cell
    return vectors[vectors.norm(dim=1) < reach]


def bonds(pos, cutoff, cell=None, pbc=(True, True, True)):
    """Nodes and vectors of all pairs of nodes and images within a cutoff."""
    steps = [torch.arange(-5.0, 6.0) if cell is not None and p else torch.zeros(1) for p in pbc]
    shifts = torch.cartesian_prod(*steps) @ (torch.zeros(3, 3) if cell is None else cell)
    vectors = pos[None, :, None] - pos[:, None, None] + shifts
    length = vectors.detach().norm(dim=3)
    first, second, image = ((length > 0) & (length < cutoff)).nonzero().T
    return {"edge_index": torch.stack([first, second]), "edge_vectors": vectors[first, second, image]}


def by_torch_pme(charges, positions, cell, softness):
    """Energy of a cell of Gaussian charges by torch-pme's waves, of which none is longer than exp(-5.5^2)."""
    from torchpme import CoulombPotential, EwaldCalculator

    # it takes half as many waves to either side as waves of this length are in a cell
    calculator = EwaldCalculator(CoulombPotential(math.sqrt(2) * softness), lr_wavelength=math.pi * softness / 5.5)
    no_pairs = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    return (charges * calculator(charges[:, None], cell, positions, *no_pairs)[:, 0]).sum()


def rock_salt():
    """Charges, positions, the cubic cell and the nearest distance in sodium chloride."""
    places = torch.tensor(list(itertools.product(range(2), repeat=3)), dtype=torch.float64)
    return 1 - 2 * (places.sum(1) % 2), places, 2 * torch.eye(3, dtype=torch.float64), 1.0


ROCK_SALT = 1.7475645946331822  # Madelung's constant, for the nearest distance


class Hat(Kernel):
    """A kernel of a user's own: K(r) = (1 - t) exp(-t) with t = r² / 2 s²."""

    def ranges(self, scaled_cutoff):
        return super().ranges(1.1 * scaled_cutoff)

    def radial_functions(self, t):
        return torch.stack([(1 + degree - t) * (-t).exp() for degree in range(self.lmax + 1)])

    def transform(self, square, coulomb, index):
        widths = self.widths.mT.to(square.dtype)[index]
        x = widths.square() * square
        return (2 * math.pi) ** 1.5 * widths**3 * (x - 1) / 2 * (-x / 2).exp()


class Own(torch.nn.Module):
    """``count`` kernels of a kind for each head, with widths in the octave above ``low``."""

    def __init__(self, kind=Hat, count=2, heads=1, low=1.0):
        super().__init__()
        self.kind, self.count, self.low = kind, count, low
        self.octaves = torch.nn.Parameter(torch.zeros(heads, count))

    def forward(self, gains):
        widths = self.low * torch.exp2(self.octaves.sigmoid())
        return self.kind(widths, gains, ((self.low, 2 * self.low),) * self.count)


def attend(
    query,
    key,
    value,
    pos,
    kernels,
    batch=None,
    *,
    cell=None,
    pbc=None,
    method="auto",
    error=1e-4,
    max_hkl=None,
    **sizes,
):
    """The sums of layers for given queries (T, heads, C, A), keys and values (T, heads, V), with all products of values
    and harmonics, (T, heads, V (lmax + 1)²)."""
    node_batch = NodeBatch.flat(query, batch, **sizes)
    interaction = Interaction(tuple(kernels), Product(_every_product, ()), error, max_hkl)
    cells = cells_of(cell, pbc, node_batch.count, query)
    return ewald_attention(pos, query, (key, value), interaction, node_batch, cells, method)


def _every_product(parts):
    """Values times all harmonics: (..., V) to (..., V (lmax + 1)²)."""
    each = [x.mT if y is None else x[..., None] * y[..., None, :] for x, y in parts]
    return torch.cat(each, -1).flatten(-2)
