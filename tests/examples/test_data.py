"""Data of the studies and a baseline: labels are what their formulas say."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from baselines.ewald_message_passing import SCALE, EwaldMessagePassing
from data.forgeries import region
from data.lennard_jones import DEPTHS, LENGTHS, SIZES, STIFFNESSES, lennard_jones
from data.lennard_jones import Potential as LennardJones
from data.proteins import BEAD, clusters, drag, mobility, response, rigid_motions, split, stiffness, synthetic
from data.soft_charges import soft_charges
from data.surfaces import FORMAL, potentials
from data.turned import SIDE, adrenal, digits, turned
from harness.training import parameters
from scipy.spatial.transform import Rotation
from vision_transformers import VisionTransformers, build, predict


def test_soft_charges():
    """Sums over pairs, forces as derivatives of energies, neutral clouds in their box."""
    clouds = soft_charges(3, 6, side=4.0, softness=0.5, seed=1)
    assert (clouds.charges.sum(1) == 0).all()
    assert clouds.positions.min() >= 0
    assert 2 < clouds.positions.max() <= 4
    charges, positions = clouds.charges[1], clouds.positions[1].clone().requires_grad_()
    energy = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        apart = [math.dist(positions[i].tolist(), positions[j].tolist()) for j in others]
        potential = sum(float(charges[j]) / math.sqrt(r * r + 0.25) for j, r in zip(others, apart, strict=True))
        assert float(clouds.potentials[1, i]) == pytest.approx(potential, rel=1e-12)
        for j in others:
            energy = energy + charges[i] * charges[j] / ((positions[i] - positions[j]).square().sum() + 0.25).sqrt() / 2
    assert float(clouds.energies[1]) == pytest.approx(energy.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(energy, positions)
    torch.testing.assert_close(clouds.forces[1], -slope, rtol=0, atol=1e-12)


def test_ewald_message_passing():
    """Against the sum over pairs and waves, one by one, k and -k alike; and charges far apart see each other."""
    layer = EwaldMessagePassing(3, max_wavenumber=1.0, spacing=0.4).double()
    x, pos = torch.randn(2, 5, 3).double(), 6 * torch.rand(2, 5, 3).double()
    grid = torch.cartesian_prod(*[torch.arange(-3, 4.0)] * 3).double() * 0.4
    grid = grid[grid.norm(dim=1) <= 1.0]
    assert 2 * len(layer.waves) == len(grid) + 1  # zero is its own mirror image
    centres = torch.linspace(0, 1, 48).double()
    wanted = torch.zeros_like(x)
    given, here = layer.before(x), pos - pos.mean(1, keepdim=True)
    damping = torch.sin(0.2 * here) / (0.2 * here)
    for wave in grid:
        gaussians = torch.exp(-((wave.norm() - centres) * 47).square() / 2)
        filters = layer.up(layer.down(gaussians)) * (1.0 if float(wave.norm()) == 0 else 0.5)
        for box in range(2):
            for i in range(5):
                for j in range(5):
                    phase = torch.cos(wave @ (here[box, i] - here[box, j]))
                    damped = damping[box, i].prod() * damping[box, j].prod()
                    wanted[box, i] += damped * phase * filters * given[box, j]
    out = layer(x, pos)
    torch.testing.assert_close(out, layer.after(SCALE * wanted), rtol=1e-5, atol=1e-5)  # the waves are in float32
    moved = pos.clone()
    moved[:, 0] += 0.5
    assert (layer(x, moved) - out)[:, 1:].abs().min() > 1e-6


def test_energies_of_molecules_are_the_sum_over_pairs():
    """Atom by atom; forces are minus the gradient; turning, shifting and mirroring changes no energy."""
    molecules = lennard_jones(5, 4, 9, seed=1, steps=60)
    for species, bonds, pos, energy, forces in zip(*molecules, strict=True):
        there = int((species >= 0).sum())
        places = pos[:there].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for i in range(there):
            for j in range(i):
                r = (places[i] - places[j]).square().sum().sqrt()
                if bonds[i, j] >= 0:
                    total = total + STIFFNESSES[bonds[i, j]] * (r - LENGTHS[bonds[i, j]]) ** 2 / 2
                else:
                    size = (SIZES[species[i]] + SIZES[species[j]]) / 2
                    depth = math.sqrt(DEPTHS[species[i]] * DEPTHS[species[j]])
                    total = total + 4 * depth * ((size / r) ** 12 - (size / r) ** 6)
        assert float(energy) == pytest.approx(total.item(), rel=1e-10)
        (slope,) = torch.autograd.grad(total, places)
        torch.testing.assert_close(forces[:there], -slope, rtol=1e-9, atol=1e-9)
        assert (forces[there:] == 0).all()
        assert (pos[there:] == 0).all()
    turn = torch.tensor(Rotation.random(rng=3).as_matrix())
    moved = molecules.positions @ turn.T + 7.0
    potential = LennardJones(molecules.species, molecules.bonds)
    for positions in (moved, -moved):
        torch.testing.assert_close(potential.energies(positions), molecules.energies, rtol=1e-9, atol=1e-9)


def homologue(protein, share, seed):
    """The same chain with a share of its residues drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(20, protein.residue.shape, generator=generator)
    other = torch.rand(protein.residue.shape, generator=generator) < share
    return dataclasses.replace(protein, residue=torch.where(other, drawn, protein.residue))


def test_homologues_are_in_one_split():
    families = [synthetic(1, 150, 190, seed)[0] for seed in range(30)]
    found = [protein for n, family in enumerate(families) for protein in (family, homologue(family, 0.4, n))]
    label = clusters(found)
    assert label[::2] == label[1::2]
    assert len(set(label)) == len(families)
    parts = split(found, 0)
    names = [{id(protein) for protein in part} for part in parts]
    places = [next(n for n, part in enumerate(names) if id(protein) in part) for protein in found]
    assert places[::2] == places[1::2]
    assert [len(part) for part in parts] == [42, 6, 12]


def test_the_response_is_the_pseudo_inverse():
    pos = synthetic(1, 17, 17, 0)[0].pos
    matrix = stiffness(pos)
    found = response(pos).reshape(51, 51)
    assert torch.allclose(found, torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True), atol=1e-9)
    assert (matrix @ rigid_motions(pos)).abs().max() < 1e-9 * matrix.abs().max()
    # a spring of stiffness 100 / d^2 along the line between two residues
    offset = pos[3] - pos[11]
    expected = -100 / offset.square().sum() ** 2 * torch.outer(offset, offset)
    assert torch.allclose(matrix[9:12, 33:36], expected)


def test_drag_is_that_of_beads():
    """One bead; two beads, of which each moves in the flow of the other; and forces from which velocities come back."""
    assert torch.equal(drag(torch.zeros(1, 3).double()), torch.eye(3).double()[None])
    pair = drag(torch.tensor([[0.0, 0, 0], [0, 0, 40]]).double())
    a = BEAD / 40
    along, across = 1.5 * a - a**3, 0.75 * a + a**3 / 2
    expected = torch.tensor([1 / (1 + across), 1 / (1 + across), 1 / (1 + along)]).double().diag()
    assert torch.allclose(pair, expected.expand(2, 3, 3), atol=1e-7)
    pos = synthetic(1, 17, 17, 0)[0].pos
    forces, moves = drag(pos).flatten(0, 1), torch.eye(3).double().repeat(17, 1)
    assert torch.allclose(mobility(pos) @ forces, moves)
    assert torch.linalg.eigvalsh(mobility(pos)).min() > 0


def test_potentials_of_two_charges():
    """Lysine, aspartate and glycine on a line, 6 and 18 angstroms apart."""
    residue, pos = torch.tensor([11, 3, 7]), torch.tensor([[0.0, 0, 0], [6, 0, 0], [24, 0, 0]])
    assert FORMAL[residue].tolist() == [1, -1, 0]
    found = potentials(residue, pos)
    torch.testing.assert_close(found[:, 4], torch.tensor([-10 / 6, 10 / 6, 10 / 24 - 10 / 18]))
    decay = math.exp(-1)
    torch.testing.assert_close(found[0, 1], torch.tensor(-10 / 6 * decay, dtype=torch.float32))


@pytest.mark.parametrize("mirror", [1, -1])
def test_offsets_of_a_copy_are_those_of_its_source(mirror):
    """A copy by a quarter turn, mirrored or not, holds the source's pixels, read at the offsets of its region."""
    matrix = np.array([[0.0, mirror], [-1, 0]])
    radii, (here, there) = np.array([5, 0, 1j], complex), np.array([[10.0, 12], [25, 20]])
    _, source = region(40, here, np.eye(2), radii)
    offsets, copy = region(40, there, matrix, radii)
    rows, columns = np.rint(offsets + here[:, None, None]).astype(int).clip(0, 39)
    inside = copy > 0.01
    np.testing.assert_allclose(source[rows, columns][inside], copy[inside], atol=1e-6)


@pytest.mark.parametrize("dim", [2, 3])
def test_rotations_are_random_and_about_the_middle(dim):
    """A ball stays, a half becomes another half, and no image is mirrored."""
    axes = torch.meshgrid(*[torch.linspace(-1, 1, 15)] * dim, indexing="ij")
    ball = torch.exp(-8 * sum(x**2 for x in axes))
    images = torch.stack([ball, ball * (axes[0] > 0)])[None].expand(4, -1, *[-1] * dim)
    out = turned(images, torch.Generator().manual_seed(0))
    torch.testing.assert_close(out[:, 0], images[:, 0], rtol=0, atol=0.1)
    assert (out[:, 1] - out[:1, 1]).abs().amax(tuple(range(1, dim + 1)))[1:].min() > 0.1
    coordinates = torch.stack(axes)
    moved = turned(coordinates[None], torch.Generator().manual_seed(1))[0]
    middle = (slice(None), *[slice(5, 10)] * dim)
    a, b = (x[middle].flatten(1) for x in (coordinates, moved))
    found = b @ a.T @ torch.linalg.inv(a @ a.T)
    torch.testing.assert_close(found @ found.T, torch.eye(dim), rtol=0, atol=1e-4)
    assert torch.linalg.det(found) == pytest.approx(1, abs=1e-4)


def test_parts_of_digits():
    training, validation, test = digits(None, 50)
    assert [len(x) for x, _ in (training, validation, test)] == [50, 90, 450]


def test_volumes_and_their_models(tmp_path):
    """Of both kinds, at equal parameters where the name says so."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name in ("train", "val", "test"):
        arrays[f"{name}_images"] = rng.integers(0, 255, (3, 64, 64, 64), np.uint8)
        arrays[f"{name}_labels"] = np.arange(3)[:, None] % 2
    np.savez(tmp_path / "volumes.npz", **arrays)
    training, validation, _ = adrenal(tmp_path / "volumes.npz", 2)
    assert training[0].shape == (2, 1, SIDE, SIDE, SIDE)
    assert validation[1].tolist() == [0, 1, 0]
    sizes = {}
    names = "frames cube", "G-CNN cube", "convolutions + frames cube", "convolutions + plain", "CNN"
    plain = "plain, equal parameters", "plain, equal width", "convolutions + plain, equal parameters"
    for name in (*names, *plain):
        settings = VisionTransformers(models=(name,), data=tmp_path / "volumes.npz", layers=1)
        settings.check()
        model = build(settings, SIDE)
        assert predict(model, [*training])[0].shape == (2, 2)
        sizes[name] = parameters(model)
    assert sizes["plain, equal width"] > 4 * sizes["plain, equal parameters"]
