"""Proteins: their split, the elastic network that answers a push, graphs in batches, and models of one size."""

import dataclasses

import torch
from data.protein_sets import sets
from data.proteins import BEAD, clusters, drag, mobility, response, rigid_motions, split, stiffness, synthetic
from proteins import ProteinsStudy, batches, build

SMALL = {  # settings of models and of synthetic proteins
    "synthetic": 24, "residues": (12, 20), "larger": 30, "neighbors": 4, "scalars": 8, "vectors": 4, "hidden": 8,
    "num_layers": 2, "kernels": (1, 1), "batch": 1,
}  # fmt: skip


def graphs_of(run, name, number=0):
    """A batch of a set of synthetic proteins."""
    found = sets(None, run.synthetic, run.residues, run.larger)[name]
    return batches(run, found, 0).get([number])


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


def turned(graph, matrix, shift):
    """The graph, in float64, moved and turned or mirrored."""
    tensors = {field.name: getattr(graph, field.name) for field in dataclasses.fields(graph) if field.name != "count"}
    graph = dataclasses.replace(graph, **{name: x.double() for name, x in tensors.items() if x.is_floating_point()})
    changes = {name: getattr(graph, name) @ matrix.T for name in ("frames", "edge_unit", "push", "target")}
    return dataclasses.replace(graph, pos=graph.pos @ matrix.T + shift, **changes)


def test_models_turn_with_proteins():
    torch.manual_seed(0)
    for run in ProteinsStudy(**SMALL, tasks=("response", "drag")).runs():
        graph = graphs_of(run, "complexes")
        model, eye = build(run).double(), torch.eye(3, dtype=torch.float64)
        out = model(turned(graph, eye, 0.0))
        rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
        for matrix in (rotation, -rotation):  # one of them mirrors
            change = (model(turned(graph, matrix, 7.0)) - out @ matrix.T).abs().max() / out.abs().max()
            assert change < 1e-9, run.models
