"""Ewald attention: direct sums by the definition, reciprocal sums and NUFFTs against direct sums over images."""

import itertools
import math

import ewald
import pytest
import torch
from ewald import Hat, attend
from space import batch_of, error

from tg_equiattn.ewald.harmonics import solid_harmonics
from tg_equiattn.functional import Coulomb, Gaussian

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

BOUNDS = ((0.8, 1.0), (1.0, 1.2), (0.8, 1.0), (1.0, 1.2))
PROMISED = 1e-4


@pytest.fixture(autouse=True)
def _skip_without_finufft(request):
    if "nufft" in request.node.name:
        pytest.importorskip("finufft")


def kernels(lmax=1, heads=2, narrow=False, kinds=(Gaussian, Coulomb)):
    """Two kernels of each of two kinds for each head; as narrow as they may be, if ``narrow``."""
    lows = torch.tensor([low for low, _ in BOUNDS], dtype=torch.float64)
    widths = lows * (1 if narrow else 1 + 0.2 * torch.rand(heads, 4, dtype=torch.float64))
    widths, gains = widths.expand(heads, 4), torch.randn(heads, 4, lmax + 1, dtype=torch.float64)
    made = []
    for kind, these in zip(kinds, (slice(0, 2), slice(2, 4)), strict=True):
        made.append(kind(widths[:, these], gains[:, these], BOUNDS[these]))
    return made


def operands(count, heads=2, contracted=3, channels=2, spread=2.0):
    q, k = torch.randn(2, count, heads, 4, contracted, dtype=torch.float64)
    return q, k, torch.randn(count, heads, channels, dtype=torch.float64), spread * torch.rand(count, 3).double()


def definition(kernel, c):
    """K(r) of a kernel as a function of an offset (3,), and the unit of length of its derivatives."""
    s = kernel.widths[0, c]

    def gaussian(r):
        return (-r.square().sum() / (2 * s**2)).exp()

    if isinstance(kernel, Gaussian):
        return gaussian, s
    if isinstance(kernel, Coulomb):
        return lambda r: s * torch.erf(r.norm() / (math.sqrt(2) * s)) / r.norm(), s
    return lambda r: gaussian(r) * (1 - r.square().sum() / (2 * s**2)), s


def derived(r, function, s):
    """s^l Y_l(grad) K up to degree 2 by differentiation, (9,): polynomials of degree l are their own leading parts."""
    slope, bend = (d(function, r) for d in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian))
    unit = torch.eye(3, dtype=r.dtype)
    first = solid_harmonics(unit, 1)[:, 1:]  # of x, y and z
    second = torch.stack([  # symmetric matrices, from values at sums of unit vectors
        solid_harmonics(unit[a] + unit[b], 2)[4:] - solid_harmonics(unit[a], 2)[4:] - solid_harmonics(unit[b], 2)[4:]
        for a in range(3) for b in range(3)
    ]) / 2  # fmt: skip
    return torch.cat([function(r)[None], s * slope @ first, s**2 * bend.flatten() @ second])


KINDS = [
    ("direct", (Gaussian, Coulomb)),
    ("direct", (Coulomb, Hat)),
    ("ewald", (Gaussian, Coulomb)),
    ("ewald", (Coulomb, Hat)),
    ("nufft", (Gaussian, Coulomb)),
    ("nufft", (Coulomb, Hat)),
]


@pytest.mark.parametrize(("method", "kinds"), KINDS)
def test_definition(method, kinds):
    ker, (q, k, v, pos) = kernels(lmax=2, heads=1, kinds=kinds), operands(4, heads=1)
    expected = torch.zeros(4, 2, 9, dtype=torch.float64)
    for (i, j), c in itertools.product(itertools.permutations(range(4), 2), range(4)):
        own = ker[c // 2]
        gains = own.gains[0, c % 2].repeat_interleave(torch.tensor([1, 3, 5]))
        found = derived(pos[i] - pos[j], *definition(own, c % 2))
        expected[i] += (q[i, 0, c] @ k[j, 0, c]) * torch.outer(v[j, 0], gains * found)
    others = attend(q, k, v, pos, ker, method=method)
    for i in range(4):  # a node attends to itself with K(0) and the even derivatives
        others[i] -= attend(*(x[i : i + 1] for x in (q, k, v, pos)), ker, method=method)[0]
    assert error(others.view(4, 2, 9), expected) <= (1e-10 if method == "direct" else PROMISED)


OPEN = [("ewald", {"narrow": True}), ("ewald", {"kinds": (Coulomb, Hat), "lmax": 2})]
OPEN += [pytest.param("nufft", {"narrow": True}, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("method", "options"), [*OPEN, *(pytest.param(m, {}, marks=pytest.mark.slow) for m in ("ewald", "nufft"))]
)
def test_open_clouds_by_reciprocal_sums(method, options):
    """Outputs, slopes and second derivatives equal those of direct sums to the promised error."""
    for promised in (1e-2, PROMISED if options else 1e-5):
        ker = kernels(heads=1, **options)
        q, k, v, pos = operands(11, heads=1)
        pos.requires_grad_()
        found = []
        for one in ("direct", method):
            torch.manual_seed(3)
            out = attend(q, k, v, pos, ker, method=one, error=promised)
            (slope,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), pos, create_graph=True)
            (bend,) = torch.autograd.grad((slope * torch.randn_like(slope)).sum(), pos)
            assert slope.is_contiguous()
            found.append([out, slope, bend])
        errors = [error(a, b) for a, b in zip(found[1], found[0], strict=True)]
        assert max(errors) <= 3 * promised
        if "narrow" in options and promised == 1e-2:
            assert max(errors) > 1e-5


CELL = [[3.1, 0.2, 0.1], [0.3, 3.6, -0.2], [-0.4, 0.5, 2.9]]


@pytest.mark.parametrize("pbc", [(True, True, True), (True, False, True)])
@pytest.mark.parametrize(("method", "kind"), [("ewald", Gaussian), ("nufft", Gaussian), ("auto", Hat)])
def test_sums_over_images(pbc, method, kind):
    """Crystals and slabs, with all kernels that have a finite range."""
    ker, (q, k, v, pos) = kernels(lmax=2, kinds=(Gaussian, kind)), operands(4)
    cell = torch.tensor(CELL, dtype=torch.float64)
    shifts = ewald.lattice(cell, 11.0)
    numbers = (shifts @ torch.linalg.inv(cell)).round()
    shifts = shifts[(numbers[:, ~torch.tensor(pbc)] == 0).all(1)]
    everywhere = [x.repeat(len(shifts), *[1] * (x.ndim - 1)) for x in (k, v)]
    places = (pos[None] + shifts[:, None]).flatten(0, 1)
    # the cloud itself, and all images as sources
    far = torch.cat([q, torch.zeros_like(everywhere[0])])
    source, values = (torch.cat([torch.zeros_like(x[:4]), x]) for x in everywhere)
    wanted = attend(far, source, values, torch.cat([pos, places]), ker, method="direct")[:4]
    got = attend(q, k, v, pos, ker, cell=cell, pbc=torch.tensor(pbc), method=method)
    assert error(got, wanted) <= PROMISED


@pytest.mark.parametrize("kinds", [(Gaussian, Coulomb), (Coulomb, Hat)])
def test_molecules_in_wide_cells(kinds):
    """Sums over pairs and images equal reciprocal sums: outputs, slopes by positions and cells, second derivatives."""
    ker, (q, k, v, pos) = kernels(heads=1, kinds=kinds), operands(4, heads=1)
    pos.requires_grad_()
    cell = (4 * torch.tensor(CELL, dtype=torch.float64)).requires_grad_()
    found = []
    for method in ("ewald", "auto"):
        torch.manual_seed(3)
        out = attend(q, k, v, pos, ker, cell=cell, method=method, error=PROMISED)
        slopes = torch.autograd.grad((out * torch.randn_like(out)).sum(), (pos, cell), create_graph=True)
        bends = torch.autograd.grad(sum((x * torch.randn_like(x)).sum() for x in slopes), (pos, cell))
        assert slopes[0].is_contiguous()
        found.append([out, *slopes, *bends])
    assert not torch.equal(found[0][0], found[1][0])
    assert max(error(b, a) for a, b in zip(*found, strict=True)) <= 3 * PROMISED


def test_potentials_of_crystals_are_ewalds():
    """The energy of a cell of Gaussian charges by torch-pme, and Madelung's constant of sharp ones."""
    pytest.importorskip("torchpme")
    charges, pos, cell, nearest = ewald.rock_salt()
    one = torch.ones(8, 1, 1, 1, dtype=torch.float64)
    for s, wanted in ((0.5, None), (0.12, ewald.ROCK_SALT)):
        ker = [Coulomb(torch.tensor([[s]]).double(), torch.ones(1, 1, 1).double(), ((s, 2 * s),))]
        potential = attend(one, one, charges[:, None, None], pos, ker, cell=cell, error=1e-10).flatten() / s
        energy = (charges * potential).sum() / 2 - charges.square().sum() * math.sqrt(2 / math.pi) / (2 * s)
        if wanted is None:
            wanted = -2 * float(ewald.by_torch_pme(charges, pos, cell, s / math.sqrt(2))) / 8
        torch.testing.assert_close(-2 * float(energy) / 8 * nearest, wanted, rtol=1e-7, atol=0)


@pytest.mark.parametrize("method", ["ewald", "nufft"])
def test_potentials_of_slabs(method):
    """A neutral slab, across any vector, is its crystal with a gap, corrected for its dipole (Yeh and Berkowitz)."""
    ker, (_, _, v, pos) = kernels(lmax=0, heads=1, kinds=(Coulomb, Coulomb)), operands(6)
    one = torch.ones(6, 1, 4, 1, dtype=torch.float64)
    v = (v - v.mean(0))[:, :1]
    options = {"method": method, "error": 1e-8}
    for place in range(3):
        cell = torch.tensor(CELL, dtype=torch.float64)
        a, b = cell[(place + 1) % 3], cell[(place + 2) % 3]
        normal = torch.linalg.cross(a, b)
        area, normal = normal.norm(), normal / normal.norm()
        gap = cell.clone()
        gap[place] = 40 * normal
        pbc = torch.ones(3, dtype=torch.bool)
        pbc[place] = False
        crystal = attend(one, one, v, pos, ker, cell=gap, **options)
        slabs = [attend(one, one, v, pos, ker, cell=c, pbc=pbc, **options) for c in (gap, cell)]
        height = pos @ normal
        moments = [(v[:, 0] * height[:, None] ** n).sum(0) for n in (1, 2)]
        # field of all slabs above and below: quadratic in the height, 2 pi / V (2 z M - Q), times s of each kernel
        correction = 4 * math.pi / (40 * area) * (height[:, None] * moments[0] - moments[1] / 2)
        strength = sum((own.widths[0] * own.gains[0, :, 0]).sum() for own in ker)
        assert error(slabs[1], slabs[0]) <= 1e-7
        assert error(slabs[0][:, 0], crystal[:, 0] + strength * correction) <= 1e-6
        assert error(slabs[0][:, 0], crystal[:, 0]) > 1e-3


def mixed_batch():
    """Molecules, crystals, a slab and an empty graph: sizes, batch, operands and kernels, cells."""
    sizes = [5, 0, 9, 1, 7]
    batch, ker = batch_of(sizes), kernels()
    tensors = *operands(sum(sizes)), ker
    cell = torch.tensor(CELL).double() + 0.3 * torch.randn(5, 3, 3).double()
    pbc = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]).bool()
    return sizes, batch, tensors, {"cell": cell, "pbc": pbc}


@pytest.mark.parametrize("method", ["auto", "ewald", "nufft"])
def test_each_graph_of_a_batch_is_what_it_is_alone(method):
    sizes, batch, (*tensors, ker), cells = mixed_batch()
    together = attend(*tensors, ker, batch, **cells, method=method, batch_size=5)
    for graph, size in enumerate(sizes):
        if size:
            here, own = batch == graph, {name: x[graph] for name, x in cells.items()}
            alone = attend(*(x[here] for x in tensors), ker, **own, method=method)
            assert error(together[here], alone) <= 1e-12


def test_cells_in_one_matrix_and_bounded_vectors_change_nothing():
    _, batch, tensors, cells = mixed_batch()
    wanted = attend(*tensors, batch, **cells, batch_size=5)
    flat = {"cell": cells["cell"].flatten(0, 1), "pbc": cells["pbc"].flatten()}
    assert error(attend(*tensors, batch, **flat, batch_size=5), wanted) <= 1e-12
    sizes = {"batch_size": 5, "max_num_nodes": 11}
    bounded = attend(*tensors, batch, **cells, max_hkl=(6, 6, 17), **sizes)
    assert error(bounded, wanted) <= 1e-6


@pytest.mark.parametrize("periodic", [False, True])
def test_heads_that_share_kernels_are_heads_alone(periodic):
    """Of scalars, whose scores are products of two numbers: outputs and slopes, open and in crystals."""
    widths, gains = torch.rand(1, 4).double() / 5 + 1, torch.randn(3, 4, 2).double()
    q, k, v, pos = operands(7, heads=3, contracted=1)
    inputs = [x.requires_grad_() for x in (q, k, v, pos, widths, gains)]
    options = {"cell": 4 * torch.tensor(CELL, dtype=torch.float64)} if periodic else {}

    def of_heads(heads):
        bounds = ((1.0, 1.2),) * 2
        ker = [kind(widths[:, n], gains[heads][:, n], bounds) for kind, n in ((Gaussian, [0, 1]), (Coulomb, [2, 3]))]
        return attend(q[:, heads], k[:, heads], v[:, heads], pos, ker, error=1e-8, **options)

    found, wanted = of_heads([0, 1, 2]), torch.cat([of_heads([head]) for head in range(3)], 1)
    assert error(found, wanted) <= (1e-8 if periodic else 1e-12)
    slopes = [torch.autograd.grad(x.square().sum(), inputs) for x in (found, wanted)]
    assert max(error(a, b) for a, b in zip(*slopes, strict=True)) <= (1e-6 if periodic else 1e-11)


@pytest.mark.parametrize("method", ["ewald", "nufft", "auto"])
def test_kernels_that_share_vectors_are_sums_over_each_kernel(method):
    """Wide kernels before narrow ones, two of one width, in two cells of other sizes: outputs and slopes by cells."""
    widths = torch.tensor([[3.2, 0.8, 1.6, 0.8]], dtype=torch.float64)
    gains, (q, k, v, pos) = torch.randn(1, 4, 2, dtype=torch.float64), operands(9, heads=1, spread=6.0)
    batch, cell = batch_of([4, 5]), 3 * torch.tensor(CELL, dtype=torch.float64).expand(2, 3, 3).clone()
    cell = (cell * torch.tensor([1.0, 0.8])[:, None, None]).requires_grad_()
    options = {"cell": cell, "method": method, "error": 1e-6}

    def sums(*columns):
        bounds = tuple((float(w), float(w)) for w in widths[0, list(columns)])
        kernel = Coulomb(widths[:, columns], gains[:, columns], bounds)
        out = attend(q[:, :, columns], k[:, :, columns], v, pos, [kernel], batch, **options)
        return [out, *torch.autograd.grad(out.square().sum(), cell, retain_graph=True)]

    each = [sums(c)[0] for c in range(4)]
    wanted = [sum(each), *torch.autograd.grad(sum(each).square().sum(), cell)]
    assert max(error(a, b) for a, b in zip(sums(0, 1, 2, 3), wanted, strict=True)) <= 1e-5
