"""Sources of Coulomb kernels: their sums over graphs and fragments, and energies that follow from them."""

import itertools

import pytest
import torch
from ewald import bonds
from space import error, motion
from tg_equiattn.integrations.e3nn.atoms_attention import Atoms, AtomsEwaldAttention

from tg_equiattn.graphs.node_batch import NodeBatch

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:Coulomb sources of a graph")]
ELEMENTS = 3


@pytest.fixture
def attention():
    """A layer of which every parameter counts. Coulomb kernels alone, so that long range is that of its sources."""
    torch.manual_seed(0)
    layer = AtomsEwaldAttention(
        "5x0e + 2x1o", "3x0e + 2x1o", width=1.0, num_gaussians=0, num_coulomb=2, num_elements=ELEMENTS, cutoff=2.0,
        avg_num_neighbors=3.0,
    )  # fmt: skip
    with torch.no_grad():
        for x in layer.parameters():
            x += 0.3 * torch.randn_like(x)
    return layer.requires_grad_(False)


def atoms_of(pos, elements, charge=None, batch=None):
    """Edges of all pairs within the cutoff and within one graph."""
    edge_index, vectors = bonds(pos, 2.0).values()
    kept = slice(None) if batch is None else batch[edge_index[0]] == batch[edge_index[1]]
    return Atoms(elements, edge_index[:, kept], vectors[kept], charge)


def crystal_ball(radius):
    """Neutral ball of rocksalt: whole cells of eight atoms with their centers within a radius, spacing 1.5."""
    side = int(radius / 3) + 1
    cells = 3.0 * torch.cartesian_prod(*[torch.arange(-side, side + 1.0)] * 3)
    cells = cells[cells.norm(dim=1) <= radius]
    inner = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    pos = (cells[:, None] + 0.75 * inner).flatten(0, 1)
    return pos, (inner.prod(1) > 0).long().repeat(len(cells))


def test_sums_over_graphs_are_the_stated_totals(attention):
    """Zero without a charge, a learned constant times the charge with one, for every column of a source."""
    neutral, (sizes, charge) = attention.neutral, ([5, 1, 7], torch.tensor([0.0, 2.0, -1.0]))
    batch = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    pos, elements = 3 * torch.rand(13, 3), torch.randint(0, ELEMENTS, (13,))
    sources, node_batch = torch.randn(13, 1, 2, neutral.size), NodeBatch.flat(pos, batch)
    for given in (None, charge):
        found = node_batch.sum(neutral(sources, atoms_of(pos, elements, given, batch), node_batch))
        wanted = torch.zeros_like(found)
        if given is not None:
            wanted[..., neutral.charged] = given[:, None, None, None] * neutral.charges
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_distant_fragments_without_remainder_do_not_change_each_other(attention):
    """Transfers conserve the sum of each fragment; where constants sum to zero nothing is spread."""
    neutral, generator = attention.neutral, torch.Generator().manual_seed(1)
    neutral.constants[1] = -neutral.constants[0]
    pos, elements = torch.rand(8, 3), torch.tensor([0, 1] * 4)
    sources = torch.randn(8, 1, 2, neutral.size, generator=generator)

    def found(pos, elements, sources):
        return neutral(sources, atoms_of(pos, elements), NodeBatch.flat(pos, None))

    other = torch.cat([pos, pos + 20]), elements.repeat(2), torch.cat([sources, torch.randn_like(sources)])
    torch.testing.assert_close(found(*other)[:8], found(pos, elements, sources), rtol=1e-12, atol=1e-12)
    charged = other[1].clone()
    charged[15] = 0  # with a remainder, they do
    assert error(found(other[0], charged, other[2])[:8], found(pos, elements, sources)) > 1e-3


def test_a_large_remainder_without_total_charge_is_a_warning(attention):
    pos, elements = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]), torch.tensor([0, 0])
    sources, node_batch = torch.zeros(2, 1, 2, attention.neutral.size), NodeBatch.flat(pos, None)
    for charge, words in ((None, "is not in the data and counts as 0"), (torch.zeros(1), "is 0 in the data")):
        with pytest.warns(UserWarning, match=f"do not sum to its total charge, which {words}"):
            attention.neutral(sources, atoms_of(pos, elements, charge), node_batch)


@pytest.mark.filterwarnings("error:Coulomb sources of a graph")
def test_stated_charges_and_neutral_elements_are_no_warning(attention):
    neutral = attention.neutral
    neutral.constants[1] = -neutral.constants[0]
    pos = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    sources, node_batch = torch.zeros(2, 1, 2, neutral.size), NodeBatch.flat(pos, None)
    neutral(sources, atoms_of(pos, torch.tensor([0, 1])), node_batch)
    neutral(sources, atoms_of(pos, torch.tensor([0, 0]), torch.tensor([2.0])), node_batch)


def test_a_single_open_atom_is_unchanged_and_sees_its_images(attention):
    x, pos = torch.randn(1, 11), torch.zeros(1, 3)
    for charge in (None, torch.tensor([2.0])):
        atoms = atoms_of(pos, torch.tensor([0]), charge)
        assert attention(x, pos, atoms=atoms).abs().max() < 1e-12
    assert attention(x, pos, atoms=atoms, cell=3 * torch.eye(3)).abs().max() > 1e-3


def test_elements_of_atoms_without_features_are_told_apart(attention):
    """Zero features and no edges: what a molecule feels depends on the element of a distant atom."""
    pos = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    x = torch.cat([torch.randn(2, 11), torch.zeros(1, 11)])
    found = [attention(x, pos, atoms=atoms_of(pos, torch.tensor([0, 1, z])))[:2] for z in range(ELEMENTS)]
    assert min(error(found[0], found[1]), error(found[0], found[2])) > 1e-3


@pytest.mark.parametrize("reflect", [False, True])
def test_equivariance(reflect, attention):
    r = motion(reflect=reflect)
    pos, elements, x = 3 * torch.rand(7, 3), torch.randint(0, ELEMENTS, (7,)), torch.randn(7, 11)
    turn_in, turn_out = (irreps.D_from_matrix(r) for irreps in (attention.irreps_in, attention.irreps_out))
    out = attention(x, pos, atoms=atoms_of(pos, elements))
    moved = pos @ r.T + torch.tensor([1.0, 2.0, 3.0])
    turned = attention(x @ turn_in.T, moved, atoms=atoms_of(moved, elements))
    assert error(turned, out @ turn_out.T) < 1e-10


def test_a_crystal_with_vacuum_tends_to_the_slab(attention):
    """As plane-wave codes have slabs. The difference falls as one over the vacuum; before it grew."""
    pos, elements, x = 2.5 * torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), torch.randn(6, 11)
    atoms, pbc = atoms_of(pos, elements), torch.tensor([True, True, False])

    def energy(height, **more):
        return attention(x, pos, atoms=atoms, cell=torch.diag(torch.tensor([3.0, 3.0, height])), **more)[:, :3].sum(0)

    slab = energy(20.0, pbc=pbc)
    far = [(energy(height) - slab).abs().max() / slab.abs().max() for height in (20.0, 40.0, 80.0, 160.0)]
    assert all(b < 0.6 * a for a, b in itertools.pairwise(far)), far
    assert far[-1] < 0.1, far


def test_neutral_balls_of_growing_size_converge(attention):
    """Energies per atom. Without neutral sources they grow with the square of the radius."""
    found = []
    for radius in (3.0, 6.0, 9.0):
        pos, elements = crystal_ball(radius)
        x = torch.randn(1, 11, generator=torch.Generator().manual_seed(2)).expand(len(pos), -1)
        found.append(attention(x, pos, atoms=atoms_of(pos, elements))[:, :3].mean(0))
    first, second, third = found
    assert (third - second).norm() < 0.5 * (second - first).norm()
    assert (third - second).norm() < 0.2 * third.norm()
