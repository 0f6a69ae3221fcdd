"""Euclidean fast attention in crystals: cells, their symmetries, forces and stress."""

import itertools
import math

import pytest
import torch
from clouds import S, V
from space import error, motion, move

from tg_equiattn.encodings import solid_harmonics
from tg_equiattn.functional import wave_numbers
from tg_equiattn.functional.linear.crystals import attention_in_crystals, crystals_of
from tg_equiattn.functional.linear.euclidean_attention import every_product
from tg_equiattn.functional.linear.euclidean_methods import EuclideanMethod
from tg_equiattn.nn import EuclideanFastAttention
from tg_equiattn.sequences import Sequences
from tg_equiattn.testing import TOLERANCE

CUT = 4.0
CELLS = {
    "skewed": [[2.5, 0.2, 0.1], [0.3, 3.0, -0.2], [-0.4, 0.5, 2.2]],
    "left-handed": [[0.3, 3.0, -0.2], [2.5, 0.2, 0.1], [-0.4, 0.5, 2.2]],
    "cubic": [[2.5, 0, 0], [0, 2.5, 0], [0, 0, 2.5]],
    "sheared far": [[2.5, 0, 0], [7.5, 2.5, 0], [0, -5.0, 2.5]],
}


def cell_of(name, dtype=torch.float64):
    return torch.tensor(CELLS[name], dtype=dtype)


@pytest.fixture(params=CELLS)
def cell(request):
    return cell_of(request.param)


@pytest.fixture
def make(randomise):
    def make(dtype=torch.float64, **options):
        options = {"max_radius": 3.0, "max_wavenumber": CUT, "num_nodes": 5, "qk_channels": 6, "lmax": 2} | options
        return randomise(EuclideanFastAttention(S, V, **options)).to(dtype)

    return make


def nodes(cell, count=6):
    """Of one crystal, within its cell and beyond."""
    kind = {"dtype": cell.dtype}
    pos = (3 * torch.rand(count, 3, **kind) - 1) @ cell
    return {"scalars": torch.randn(count, S, **kind), "vectors": torch.randn(count, V, 3, **kind), "pos": pos}


def repeated(x, cell, times):
    """A supercell."""
    shifts = torch.cartesian_prod(*(torch.arange(n, dtype=cell.dtype) for n in times)) @ cell
    count = len(shifts)
    pos = (x["pos"][None] + shifts[:, None]).flatten(0, 1)
    big = {"scalars": x["scalars"].repeat(count, 1), "vectors": x["vectors"].repeat(count, 1, 1), "pos": pos}
    return big, torch.tensor(times, dtype=cell.dtype)[:, None] * cell


def test_definition(cell):
    """A sum over all waves and all pairs, one at a time, with gradients."""
    lmax, heads, frequencies, count = 3, 1, 2, 4
    method = EuclideanMethod(lambda x, y, degree: every_product(lmax, x, y, degree), lmax, None, "auto", "auto")
    pos = torch.randn(3, count, dtype=torch.float64, requires_grad=True)
    query, key = torch.randn(2, heads, frequencies, 2, 1, count, dtype=torch.float64).requires_grad_().unbind(0)
    value = torch.randn(heads, 2, count, dtype=torch.float64, requires_grad=True)
    cell = cell.clone().requires_grad_()
    sequences = Sequences.dense(1, count, None, pos.device)
    function = lambda square: torch.stack([(-square).exp(), square - 1], -1)  # noqa: E731, of heads alike
    crystals = crystals_of(cell, CUT, 1, pos, None)
    weights = function(crystals.wavevectors.square().sum(2))[:, None].expand(-1, heads, -1, -1)
    actual = attention_in_crystals(method, pos, query, key, value, weights, sequences, crystals)

    expected = torch.zeros(heads, 2 * (lmax + 1) ** 2, count, dtype=torch.float64)
    for n in itertools.product(range(-6, 7), repeat=3):
        k = 2 * math.pi * torch.linalg.inv(cell) @ torch.tensor(n, dtype=torch.float64)
        if not any(n) or float(k.detach().norm()) >= CUT:
            continue
        harmonics = solid_harmonics((k / k.norm())[None], lmax)[0]
        parity = torch.arange(lmax + 1).repeat_interleave(2 * torch.arange(lmax + 1) + 1) % 2
        phase = torch.einsum("x,xij->ij", k, pos[:, :, None] - pos[:, None])
        q, s = query[:, :, :, 0, :, None], key[:, :, :, 0, None]
        even, odd = (q * s).sum(2) * phase.cos(), (q[:, :, 0] * s[:, :, 1] - q[:, :, 1] * s[:, :, 0]) * phase.sin()
        share = function(k.square().sum())[None, :, None, None]
        even, odd = (share * even).sum(1), (share * odd).sum(1)
        weight = torch.where(parity[:, None, None, None] > 0, odd, even) * harmonics[:, None, None, None]
        expected = expected + torch.einsum("lhij,hvj->hvli", weight, value).flatten(1, 2)
    expected = expected / torch.linalg.det(cell).abs() / (2 * frequencies) ** 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    probe, inputs = torch.randn_like(expected), (pos, cell, query, key, value)
    grads = [torch.autograd.grad((out * probe).sum(), inputs, retain_graph=True) for out in (actual, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"heads": 2, "qk_lmax": 1}, {"reduce": "mean", "num_nodes": None}])
def test_symmetries(cell, options, dtype, make):
    """Motions of positions and cell together, permutations, atoms taken to another cell, other cells of one lattice."""
    cell = cell.to(dtype)
    layer, x = make(dtype, **options), nodes(cell)
    out, allowed = layer(**x, cell=cell), TOLERANCE[dtype]
    for reflect in (False, True):
        r = motion(dtype, reflect)
        moved = layer(**x | {"vectors": move(x["vectors"], r), "pos": move(x["pos"], r)}, cell=move(cell, r))
        assert error(moved, (out[0], move(out[1], r))) <= allowed
    wrapped = x["pos"] + torch.randint(-2, 3, (6, 3)).to(dtype) @ cell
    assert error(layer(**x | {"pos": wrapped}, cell=cell), out) <= allowed
    shifted = x["pos"] + torch.randn(3, dtype=dtype)
    assert error(layer(**x | {"pos": shifted}, cell=cell), out) <= allowed
    other = torch.tensor([[1, 1, 0], [0, 1, 0], [0, -2, -1]], dtype=dtype) @ cell
    assert error(layer(**x, cell=other), out) <= allowed
    order = torch.randperm(6)
    permuted = layer(**{key: part[order] for key, part in x.items()}, cell=cell)
    assert error(permuted, tuple(part[order] for part in out)) <= allowed
    big, larger = repeated(x, cell, (2, 1, 3))
    assert error(layer(**big, cell=larger), tuple(part.repeat(6, *[1] * (part.ndim - 1)) for part in out)) <= allowed


def test_what_breaks_the_symmetry_is_seen(cell, make):
    """Negative controls: positions without their cell, an atom moved by half a lattice vector, half a supercell."""
    layer, x, r = make(), nodes(cell), motion()
    out = layer(**x, cell=cell)
    moved = layer(**x | {"vectors": move(x["vectors"], r), "pos": move(x["pos"], r)}, cell=cell)
    assert error(moved, (out[0], move(out[1], r))) > 1e-2
    pos = x["pos"].clone()
    pos[0] += cell[0] / 2
    assert error(layer(**x | {"pos": pos}, cell=cell), out) > 1e-2
    big, larger = repeated(x, cell, (2, 1, 1))
    assert error([part[:6] for part in layer(**big, cell=cell)], out) > 1e-2
    assert error([part[:6] for part in layer(**x, cell=larger)], out) > 1e-2


def test_open_clouds_and_crystals_in_one_batch(make):
    """Each as alone, dense and flat, whatever a batch mate and the padding hold."""
    layer, cells = make(), torch.stack([cell_of("skewed"), torch.zeros(3, 3, dtype=torch.float64), cell_of("cubic")])
    sizes = (6, 4, 2)
    graphs = [nodes(cell_of("skewed"), size) for size in sizes]
    alone = [layer(**x, **({} if not bool(c.any()) else {"cell": c})) for x, c in zip(graphs, cells, strict=True)]
    batch = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    flat = layer(**{key: torch.cat([x[key] for x in graphs]) for key in graphs[0]}, batch=batch, cell=cells)
    wanted = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    assert error(flat, wanted) <= 1e-12
    padded = {key: torch.full((3, 6, *part.shape[1:]), math.nan, dtype=part.dtype) for key, part in graphs[0].items()}
    for n, x in enumerate(graphs):
        for key, part in x.items():
            padded[key][n, : sizes[n]] = part
    dense = layer(**padded, lengths=torch.tensor(sizes), cell=cells)
    for n, size in enumerate(sizes):
        assert error([part[n, :size] for part in dense], alone[n]) <= 1e-12
    spoilt = layer(**padded | {"scalars": padded["scalars"].masked_fill(torch.arange(3)[:, None, None] > 0, math.nan)},
                   lengths=torch.tensor(sizes), cell=cells)  # fmt: skip
    assert error([part[0] for part in spoilt], alone[0]) <= 1e-12


def test_stress_and_forces(make):
    """Derivatives by strain and positions are those of finite differences; a rigid rotation costs nothing."""
    layer, cell = make(), cell_of("skewed")
    x, step = nodes(cell), 1e-5

    def energy(strain, pos):
        bend = torch.eye(3, dtype=torch.float64) + strain
        out = layer(**x | {"pos": pos @ bend, "vectors": x["vectors"] * 0}, cell=cell @ bend)
        return out[0].square().sum()

    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    pos = x["pos"].clone().requires_grad_()
    stress, forces = torch.autograd.grad(energy(strain, pos), (strain, pos))
    for tensor, grad, at in ((strain, stress, 0), (pos, forces, 1)):
        direction = torch.randn_like(tensor)
        ends = [[strain.detach(), pos.detach()] for _ in range(2)]
        for end, sign in zip(ends, (1, -1), strict=True):
            end[at] = end[at] + sign * step * direction
        slope = (energy(*ends[0]) - energy(*ends[1])) / (2 * step)
        torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(stress, stress.T, rtol=0, atol=1e-10 * float(stress.abs().max()))
    torch.testing.assert_close(forces.sum(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-10)


def test_smooth_where_waves_come_in(make):
    """A cubic cell grows through the size at which six more waves count: no jump, nor a kink."""
    layer, x = make(), nodes(cell_of("cubic"))
    fractions = x["pos"] @ torch.linalg.inv(cell_of("cubic"))
    side = 2 * math.pi / CUT  # at which the first waves are as long as the largest

    def energy(scale):
        cell = scale * 2 * side * torch.eye(3, dtype=torch.float64)
        return layer(**x | {"pos": fractions @ cell}, cell=cell)[0].square().sum()

    counts = [wave_numbers(s * 2 * side * torch.eye(3)[None].double(), CUT).shape[1] for s in (0.999, 1.001)]
    assert counts[1] - counts[0] == 3
    scales = torch.tensor([1 - 1e-3, 1.0, 1 + 1e-3], dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(sum(energy(s) for s in scales), scales)
    assert float((slopes[2] - 2 * slopes[1] + slopes[0]).abs() / slopes.abs().max()) < 1e-3


def test_gradcheck_twice(make):
    layer, cell = make(qk_channels=2, lmax=1), cell_of("skewed").requires_grad_()
    x = nodes(cell.detach(), 3)
    run = lambda pos, cell: layer(**x | {"pos": pos}, cell=cell)  # noqa: E731
    inputs = (x["pos"].requires_grad_(), cell)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_batches_without_crystals(make):
    """Zeros for all cells are open clouds, and batches of no nodes have no outputs, dense or flat."""
    layer, cell = make(), cell_of("skewed")
    x = nodes(cell)
    assert error(layer(**x, cell=cell * 0), layer(**x)) <= 1e-12
    batch = torch.arange(2).repeat_interleave(3)
    assert error(layer(**x, batch=batch, cell=cell.expand(2, 3, 3) * 0), layer(**x, batch=batch)) <= 1e-12
    none = nodes(cell, 0)
    flat = [{}, {"batch": batch[:0], "batch_size": 2}, {"batch": batch[:0], "batch_size": 2, "max_num_nodes": 3}]
    for more in flat:
        assert [part.shape for part in layer(**none, **more, cell=cell)] == [(0, S), (0, V, 3)]
    for shape in ((2, 0), (0, 5)):
        dense = {key: part.new_zeros(*shape, *part.shape[1:]) for key, part in none.items()}
        assert [part.shape for part in layer(**dense, cell=cell)] == [(*shape, S), (*shape, V, 3)]


class InACrystal(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, pos):
        scalars, vectors = pos.new_ones(len(pos), S), pos.new_ones(len(pos), V, 3)
        out = self.layer(scalars, vectors, pos=pos, cell=cell_of("skewed"))
        return torch.cat([part.flatten(1) for part in out], 1)


def test_backends_compiled_and_copies(make, check_copies):
    layer, cell = make(), cell_of("skewed")
    x = nodes(cell)
    expected = layer(**x, cell=cell)
    plain = make(backend="plain")
    plain.load_state_dict(layer.state_dict())
    assert error(plain(**x, cell=cell), expected) <= 1e-12
    numbers = wave_numbers(cell[None], CUT)
    mapped = torch.vmap(lambda cell: layer(**x, cell=cell, wave_numbers=numbers))(cell[None])
    assert error([part[0] for part in mapped], expected) <= 1e-12
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert error(compiled(**x, cell=cell, wave_numbers=numbers), expected) <= 1e-12
    with pytest.raises(Exception, match=r"wave_numbers must be given with cell under torch\.compile"):
        torch.compile(layer, fullgraph=True, backend="eager")(**x, cell=cell)
    check_copies(lambda: InACrystal(make()), InACrystal(layer), x["pos"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, make, device):
    layer, cell = make(torch.float32).to(device), cell_of("skewed", torch.float32).to(device)
    x = {key: part.to(device) for key, part in nodes(cell.cpu()).items()}
    with torch.autocast(device_type=torch.device(device).type, dtype=dtype):
        out = layer(**x, cell=cell)
    assert error(out, layer(**x, cell=cell)) <= 1e-5
    with torch.autocast(device_type=torch.device(device).type, dtype=dtype):
        half = layer(x["scalars"].to(dtype), x["vectors"].to(dtype), pos=x["pos"], cell=cell.to(dtype))
    assert error(half, out) <= 0.1


def test_atoms_that_have_wandered_in_single_precision(make):
    """Some cells away they are as good as at home; after a hundred some digits are lost, and most are not."""
    cell = cell_of("cubic", torch.float32)
    layer, x = make(torch.float32), nodes(cell)
    home = layer(**x, cell=cell)
    for cells, allowed in ((3, 1e-5), (100, 1e-3)):
        moved = x["pos"] + cells * torch.randint(-1, 2, (6, 3)).float() @ cell
        assert error(layer(**x | {"pos": moved}, cell=cell), home) <= allowed


def test_waves():
    """All whose length is below the largest, one of each pair, in the order of the cells."""
    cells = torch.stack([cell_of(name) for name in CELLS] + [torch.zeros(3, 3, dtype=torch.float64)])
    numbers = wave_numbers(cells, CUT)
    for cell, found in zip(cells, numbers.tolist(), strict=True):
        seen = {tuple(n) for n in found if any(n)}
        assert not seen & {tuple(-i for i in n) for n in seen}
        every = set()
        if bool(cell.any()):
            inverse = torch.linalg.inv(cell)
            for n in itertools.product(range(-12, 13), repeat=3):
                k = 2 * math.pi * inverse @ torch.tensor(n, dtype=torch.float64)
                if any(n) and float(k.norm()) < CUT:
                    every.add(n)
        assert seen | {tuple(-i for i in n) for n in seen} == every


def test_bad_arguments(make):
    layer, cell = make(), cell_of("cubic")
    x = nodes(cell)
    bad = {
        r"cell must be \(3, 3\) or one a graph, \(1, 3, 3\), got \(2, 3, 3\)": cell.expand(2, 3, 3),
        r"cell must be \(3, 3\).*got list": cell.tolist(),
        "cell must be floating point on cpu as x is, got torch.int64": cell.long(),
        "cell must be finite": cell * math.nan,
        "cell must have a volume, got lattice vectors in one plane": torch.ones(3, 3).double() + torch.eye(3) * 1e-8,
        "cell must have three lattice vectors, or zeros alone.*slabs and wires": cell * torch.tensor([[1], [1], [0]]),
        "max_wavenumber must let some wave into the cell.*longest are about": cell / 10,
        "max_wavenumber must leave fewer than 16,777,216 waves.*both have one unit of length": cell * 1e3,
    }
    for message, given in bad.items():
        with pytest.raises(ValueError, match=message):
            layer(**x, cell=given)
    with pytest.raises(ValueError, match="max_wavenumber must be given to the module for graphs with a cell, got None"):
        make(max_wavenumber=None)(**x, cell=cell)
    for number in (0, -1.0, math.inf, "4"):
        with pytest.raises(ValueError, match="max_wavenumber must be"):
            make(max_wavenumber=number)
    with pytest.raises(ValueError, match=r"wave_numbers must be int64 \(1, D, 3\), got shape \(2, 4, 3\)"):
        layer(**x, cell=cell, wave_numbers=torch.zeros(2, 4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="wave_numbers must be int64 on cpu as x is, got list"):
        layer(**x, cell=cell, wave_numbers=[[0, 0, 1]])
    with pytest.raises(ValueError, match="wave_numbers must be those of cell, got none for crystals"):
        layer(**x, cell=cell, wave_numbers=wave_numbers(cell[None] * 0, CUT))
    with pytest.raises(ValueError, match=r"wave_numbers must be given with cell under .* torch\.vmap"):
        torch.vmap(lambda cell: layer(**x, cell=cell)[0])(cell[None])
    with pytest.raises(ValueError, match=r"cell must be \(B, 3, 3\), got list"):
        wave_numbers(cell.tolist(), CUT)
    with pytest.raises(ValueError, match="wave_numbers must be None without cell"):
        layer(**x, wave_numbers=torch.zeros(1, 4, 3, dtype=torch.int64))
