"""Ewald attention of scalars and vectors: symmetries of clouds, slabs and crystals, sizes, smoothness, batches."""

import itertools

import pytest
import torch
from clouds import SIZES, S, V, moved, permuted, sample, within
from ewald import Own
from space import error, motion, move

from tg_equiattn.functional import Gaussian
from tg_equiattn.nn import EwaldAttention
from tg_equiattn.testing import TOLERANCE

CELLS = {
    "skewed": [[2.5, 0.2, 0.1], [0.3, 3.0, -0.2], [-0.4, 0.5, 2.2]],
    "left-handed": [[0.3, 3.0, -0.2], [2.5, 0.2, 0.1], [-0.4, 0.5, 2.2]],
    "cubic": [[2.5, 0, 0], [0, 2.5, 0], [0, 0, 2.5]],
    "sheared far": [[2.5, 0, 0], [7.5, 2.5, 0], [0, -5.0, 2.5]],
}
CRYSTAL, SLAB, OPEN = (True, True, True), (True, False, True), (False, False, False)


def cell_of(name="skewed", dtype=torch.float64):
    return torch.tensor(CELLS[name], dtype=dtype)


@pytest.fixture
def make(randomise):
    def make(dtype=torch.float64, **options):
        options = {"width": 0.8, "heads": 2, "num_gaussians": 2, "num_coulomb": 2, "lmax": 2} | options
        return randomise(EwaldAttention(S, V, **options).to(dtype))

    return make


def nodes(count=6, dtype=torch.float64, cell=None):
    pos = torch.randn(count, 3, dtype=dtype) if cell is None else (3 * torch.rand(count, 3, dtype=dtype) - 1) @ cell
    return {"scalars": torch.randn(count, S, dtype=dtype), "vectors": torch.randn(count, V, 3, dtype=dtype), "pos": pos}


def turned(x, r):
    return x | {"vectors": move(x["vectors"], r), "pos": move(x["pos"], r)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 1, "num_gaussians": 3, "num_coulomb": 0},
        {"num_gaussians": 0, "lmax": 0},
        {"num_gaussians": 1, "num_coulomb": 1, "kernels": Own(count=3, heads=2)},
    ],
)
def test_symmetries_of_clouds(options, dtype, make):
    """Motions of each graph and permutations, by direct sums exactly; rings and cubes, whose points are alike, too."""
    layer, x = make(dtype, method="direct", **options), sample("plain", SIZES, dtype)
    out, allowed = layer(**x), TOLERANCE[dtype]
    for reflect in (False, True):
        r, shift = motion(dtype, reflect), torch.randn(len(SIZES), 3, dtype=dtype)
        assert error(layer(**moved(x, r, shift)), (out[0], move(out[1], r))) <= allowed
    p = within(SIZES)
    assert error(layer(**permuted(x, p)), tuple(part[p] for part in out)) <= allowed
    cube = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=dtype)
    alike = {"scalars": torch.ones(8, S, dtype=dtype), "vectors": torch.zeros(8, V, 3, dtype=dtype), "pos": cube}
    scalars, vectors = layer(**alike)
    assert error(scalars, scalars[:1].expand(8, -1)) <= allowed
    if layer.lmax:
        outward = (vectors * cube[:, None]).sum(2, keepdim=True) * cube[:, None] / 3
        assert error(vectors, outward) <= 10 * allowed


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(("dtype", "pbc"), [(torch.float64, CRYSTAL), (torch.float64, SLAB), (torch.float32, SLAB)])
def test_symmetries_of_crystals_and_slabs(name, pbc, dtype, make):
    """Motions of positions and cell together, atoms taken to another cell, other cells of one lattice, supercells."""
    cell, pbc = cell_of(name, dtype), torch.tensor(pbc)
    layer, x, allowed = make(dtype), nodes(6, dtype, cell_of("cubic", dtype)), TOLERANCE[dtype]
    more = {"cell": cell, "pbc": pbc}
    out = layer(**x, **more)
    for reflect in (False, True):
        r = motion(dtype, reflect)
        assert error(layer(**turned(x, r), cell=move(cell, r), pbc=pbc), (out[0], move(out[1], r))) <= allowed
    taken = torch.randint(-2, 3, (6, 3)).to(dtype) * pbc @ cell
    assert error(layer(**x | {"pos": x["pos"] + taken}, **more), out) <= allowed
    assert error(layer(**x | {"pos": x["pos"] + torch.randn(3, dtype=dtype)}, **more), out) <= allowed
    other = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, -1]], dtype=dtype) @ cell
    assert error(layer(**x, cell=other, pbc=pbc), out) <= allowed
    again = torch.randperm(6).repeat(4)  # in another order, and of a supercell
    shifts = torch.cartesian_prod(*(torch.arange(n, dtype=dtype) for n in (2, 1, 2))) @ cell
    big = {key: part[again] for key, part in x.items()}
    big["pos"] = big["pos"] + shifts.repeat_interleave(6, 0)
    larger = torch.tensor([2, 1, 2], dtype=dtype)[:, None] * cell
    assert error(layer(**big, cell=larger, pbc=pbc), tuple(part[again] for part in out)) <= allowed


def test_what_breaks_the_symmetry_is_seen(make):
    """Negative controls: cells, vectors or single atoms left behind, half a supercell."""
    layer, cell, x, r = make(), cell_of(), nodes(6, cell=cell_of()), motion()
    out = layer(**x, cell=cell)
    assert error(layer(**turned(x, r), cell=cell), (out[0], move(out[1], r))) > 1e-3
    assert error(layer(**x | {"pos": move(x["pos"], r)}, cell=move(cell, r))[0], out[0]) > 1e-3
    for step, pbc in ((cell[0] / 2, CRYSTAL), (cell[1], SLAB)):
        pbc, pos = torch.tensor(pbc), x["pos"].clone()
        pos[0] += step
        assert error(layer(**x | {"pos": pos}, cell=cell, pbc=pbc), layer(**x, cell=cell, pbc=pbc)) > 1e-3
    assert error(layer(**x, cell=cell * torch.tensor([[2.0], [1], [1]])), out) > 1e-3


def neutral(layer, count=6):
    """Scalars of which values sum to zero, and no vectors: a cloud of charges for a layer of any weights."""
    scalars = torch.ones(count, S, dtype=torch.float64)
    scalars[::2] *= -1
    with torch.no_grad():
        for weight in layer.query_key:
            weight.zero_()
    return {"scalars": scalars, "vectors": torch.zeros(count, V, 3, dtype=torch.float64)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cell of graph 0 is far wider")
def test_molecules_in_growing_boxes(make):
    """In ever larger cells a molecule tends to the molecule: neutral ones fast, charged ones as one over the side."""
    layer = make(heads=1, lmax=1)
    x = neutral(layer) | {"pos": torch.randn(6, 3, dtype=torch.float64)}
    charged = x | {"scalars": x["scalars"].abs()}
    boxes = [side * torch.eye(3, dtype=torch.float64) for side in (20.0, 40.0)]
    neutrals, charges = ([error(layer(**g, cell=box)[0], layer(**g)[0]) for box in boxes] for g in (x, charged))
    assert neutrals[1] < neutrals[0] / 5
    assert neutrals[1] < 3e-3
    assert 1.8 < charges[0] / charges[1] < 2.2
    assert charges[1] > 10 * neutrals[1]


@pytest.mark.slow
@pytest.mark.parametrize("pbc", [CRYSTAL, SLAB])
def test_smooth_in_the_cell(pbc, make):
    """A cell grows by a fifth: reciprocal vectors are added, and neither the energy nor its slope has a jump."""
    layer, cell = make(lmax=1, heads=1), cell_of()
    x = nodes(5, cell=cell)
    steps = torch.linspace(1, 1.2, 81, dtype=torch.float64)
    energies = torch.stack([
        layer(**x | {"pos": x["pos"] * s}, cell=cell * s, pbc=torch.tensor(pbc))[0].square().sum().detach()
        for s in steps
    ])  # fmt: skip
    third = energies.diff(n=3).abs().max()
    assert third < 0.2 * energies.diff(n=2).abs().max()
    jump = energies + 1e-5 * (steps > 1.1) * energies.abs().max()  # what a jump of 1e-5 would look like
    assert jump.diff(n=3).abs().max() > 2 * third


@pytest.mark.parametrize("pbc", [CRYSTAL, SLAB])
def test_forces_and_stress(pbc, make):
    """Derivatives by positions and strain are finite differences; a rotation alone changes no energy."""
    layer, cell, pbc = make(), cell_of(), torch.tensor(pbc)
    x, step = nodes(6, cell=cell), 1e-5

    def energy(strain, pos):
        bend = torch.eye(3, dtype=torch.float64) + strain
        strained = x | {"pos": pos @ bend, "vectors": x["vectors"] * 0}
        return layer(**strained, cell=cell @ bend, pbc=pbc)[0].square().sum()

    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    pos = x["pos"].clone().requires_grad_()
    stress, forces = torch.autograd.grad(energy(strain, pos), (strain, pos))
    for tensor, grad, at in ((strain, stress, 0), (pos, forces, 1)):
        direction = torch.randn_like(tensor)
        ends = [[strain.detach(), pos.detach()] for _ in range(2)]
        for end, sign in zip(ends, (1, -1), strict=True):
            end[at] = end[at] + sign * step * direction
        slope = (energy(*ends[0]) - energy(*ends[1])) / (2 * step)
        torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-6, atol=1e-7)
    # the box of a slab depends on positions without gradients, so there stress is symmetric to the promised error
    torch.testing.assert_close(stress, stress.T, rtol=0, atol=1e-4 * float(stress.abs().max()))
    torch.testing.assert_close(forces.sum(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_third_derivatives_where_points_meet(dtype, make):
    """Coincident points: finite, and those of points a hair apart."""
    layer = make(dtype, lmax=1)
    x = nodes(4, dtype)
    x["pos"][1] = x["pos"][0]

    def third(pos):
        pos = pos.clone().requires_grad_()
        value = sum(part.square().sum() for part in layer(**x | {"pos": pos}))
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, pos, create_graph=True)
            value = (slope * torch.linspace(-1, 1, slope.numel(), dtype=dtype).view_as(slope)).sum()
        return slope

    near = x["pos"].clone()
    near[1, 0] += 1e-4
    assert bool(third(x["pos"]).isfinite().all())
    assert error(third(x["pos"]), third(near)) <= 1e-2


def test_far_from_home(make):
    """Clouds at coordinates of 1e6, and atoms many cells away, given in double precision to a layer of single."""
    layer, x = make(torch.float32), nodes(6, torch.float32)
    pos = x["pos"].double()
    home = layer(**x | {"pos": pos})
    assert error(layer(**x | {"pos": pos + 1e6}), home) <= 1e-5
    cell = cell_of("cubic")
    home = layer(**x | {"pos": pos}, cell=cell)
    away = pos + 1000 * torch.randint(-1, 2, (6, 3)).double() @ cell
    assert error(layer(**x | {"pos": away}, cell=cell), home) <= 1e-5
    near = pos + 3 * torch.randint(-1, 2, (6, 3)).double() @ cell
    assert error(layer(**x | {"pos": near.float()}, cell=cell.float()), home) <= 1e-4


def observed(layer, *parameters, cell=None):
    """Outputs, and gradients by positions and these parameters."""
    torch.manual_seed(1)
    x = nodes(5, cell=cell)
    x["pos"].requires_grad_()
    out = layer(**x, cell=cell)[0]
    return [out, *torch.autograd.grad(out.square().sum(), (x["pos"], *parameters))]


def test_kernels_of_ones_own_equal_those_of_the_layer():
    """Gaussians that a module returns; the layer keeps a copy of the module."""
    options, own = {"width": 1.0, "num_coulomb": 0}, Own(Gaussian)
    layer = EwaldAttention(S, V, num_gaussians=2, max_width=2.0, **options).double()
    other = EwaldAttention(S, V, num_gaussians=0, kernels=own, **options).double()
    state = {name: x for name, x in layer.state_dict().items() if name in other.state_dict() and x.numel() > 2}
    other.load_state_dict({name: x for name, x in state.items() if "extra" not in name}, strict=False)
    for a, b in zip(observed(layer, layer.octaves), observed(other, other.own_kernels.octaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert own.octaves.grad is None


@pytest.mark.slow
def test_balls_of_one_sign_grow_where_crystals_do_not(make):
    """Stated: potentials of open balls of one sign grow with the square of the radius; Gaussians do not."""
    found = {}
    for name, counts in (("Coulomb", (0, 1)), ("Gaussians", (1, 0))):
        layer = make(num_gaussians=counts[0], num_coulomb=counts[1], heads=1, lmax=0, method="direct")
        for radius in (4.0, 8.0):
            axis = torch.arange(-radius, radius + 1, dtype=torch.float64)
            pos = torch.cartesian_prod(axis, axis, axis)
            pos = pos[pos.norm(dim=1) <= radius]
            x = neutral(layer, len(pos))
            out = layer(x["scalars"].abs(), x["vectors"], pos=pos)[0]
            found[name, radius] = float(out[pos.norm(dim=1) == 0].detach().abs().max())
    assert 3 < found["Coulomb", 8.0] / found["Coulomb", 4.0] < 5.5
    assert 0.99 < found["Gaussians", 8.0] / found["Gaussians", 4.0] < 1.05


def test_fragments_far_apart(make):
    """Gaussians do not reach; potentials of neutral fragments decay with the third power of the distance at least."""
    layer = make(heads=1, lmax=1)
    x = neutral(layer) | {"pos": torch.randn(6, 3, dtype=torch.float64)}
    alone, both = layer(**x)[0], {key: torch.cat([part, part]) for key, part in x.items()}
    differences = []
    for distance in (20.0, 40.0):
        pos = torch.cat([x["pos"], x["pos"] + torch.tensor([distance, 0, 0], dtype=torch.float64)])
        differences.append(float((layer(**both | {"pos": pos})[0][:6] - alone).detach().abs().max()))
    assert differences[1] < differences[0] / 3
    gaussians = make(num_gaussians=3, num_coulomb=0, heads=1)
    far = {key: torch.cat([part, part]) for key, part in x.items()} | {"pos": pos}
    assert error(gaussians(**far)[0][:6], gaussians(**x)[0]) <= 1e-12


@pytest.mark.parametrize("side", [6.0, 12.0, 20.0, 60.0])
def test_gaussians_alone_in_cells_of_any_width(side, make):
    """Also where sums over images replace all reciprocal vectors; in the widest cells as in the open."""
    layer, x = make(num_coulomb=0, max_width=2.0, error=1e-8), nodes(4)
    given = x | {"cell": side * torch.eye(3).double()}
    out = layer(**given)
    if side > 12:
        assert error(out, layer(**x)) <= 1e-10
    else:
        layer.method = "ewald"
        assert error(layer(**given), out) < 1e-7


def test_positions_that_are_refused(make):
    """Without a number, or rounded to a large part of the narrowest width. Padding may hold anything."""
    layer, x = make(torch.float32), nodes(7, torch.float32)
    with pytest.raises(ValueError, match="pos must be finite, got NaN or infinity"):
        layer(**x | {"pos": torch.where(torch.arange(7)[:, None] == 3, torch.nan, x["pos"])})
    away = x["pos"].double() + 1e6
    assert layer(**x | {"pos": away})[0].isfinite().all()
    message = "pos must be float64 so far from the origin: .*, more than a hundredth of width, 0.8;"
    with pytest.raises(ValueError, match=message):
        layer(**x | {"pos": away.float()})
    padded = {name: part[None] for name, part in x.items()}
    padded["pos"][0, 5:] = torch.nan
    assert layer(**padded, lengths=torch.tensor([5]))[0].isfinite().all()


def test_cells_far_wider_than_their_nodes_are_told(make):
    """As some hosts put around molecules, which take minutes; silent by images, or if nothing repeats."""
    layer, x, cell = make(width=1.0, method="ewald"), nodes(2), 25 * torch.eye(3).double()
    with pytest.warns(
        UserWarning, match=r"cell of graph 0 is far wider than its 2 nodes and needs [\d,]+ reciprocal vectors"
    ):
        layer(**x, cell=cell)
    layer.method = "auto"
    layer(**x, cell=cell)
    layer(**x, cell=cell, pbc=torch.tensor(OPEN))
    layer(**nodes(9, cell=cell_of()), cell=cell_of())
