"""Potentials around proteins: hand-made inputs, files, models of one size and their symmetry."""

import dataclasses

import numpy as np
import pytest
import torch
from data.surfaces import FORMAL, made, potentials, read, surface, surfaces
from surfaces import SurfacesStudy, build

SMALL = {"synthetic": 10, "residues": (12, 20), "neighbors": 4, "scalars": 8, "vectors": 4, "hidden": 8}


def test_potentials_of_two_charges():
    """Lysine, aspartate and glycine on a line, 6 and 18 angstroms apart."""
    residue, pos = torch.tensor([11, 3, 7]), torch.tensor([[0.0, 0, 0], [6, 0, 0], [24, 0, 0]])
    assert FORMAL[residue].tolist() == [1, -1, 0]
    found = potentials(residue, pos)
    torch.testing.assert_close(found[:, 4], torch.tensor([-10 / 6, 10 / 6, 10 / 24 - 10 / 18]))
    decay = np.exp(-1)
    torch.testing.assert_close(found[0, 1], torch.tensor(-10 / 6 * decay, dtype=torch.float32))


def test_files_are_read_as_written(tmp_path):
    """Sets, centres, chains and unknown potentials, in units of training."""
    found = made(10, (12, 20), 40)
    every = [(name, *one) for name, part in found.items() for one in part]
    for _, _, _, potential in every:
        potential[3] = torch.nan
    arrays = {
        "residue": [p.residue for _, p, _, _ in every], "chain": [p.chain for _, p, _, _ in every],
        "alpha": [p.pos for _, p, _, _ in every], "centre": [c + 1 for _, _, c, _ in every],
        "potential": [x for _, _, _, x in every],
    }  # fmt: skip
    arrays = {name: torch.cat(x).numpy() for name, x in arrays.items()}
    start = np.cumsum([0, *(len(p) for _, p, _, _ in every)])
    path = tmp_path / "surfaces.npz"
    np.savez(path, start=start, name=[p.name for _, p, _, _ in every], set=[name for name, *_ in every], **arrays)
    back = read(path)
    for name, part in found.items():
        for (protein, centre, potential), (other, moved, same) in zip(part, back[name], strict=True):
            assert torch.equal(protein.pos, other.pos)
            assert torch.equal(protein.chain, other.chain)
            torch.testing.assert_close(moved, centre + 1)
            torch.testing.assert_close(same, potential, equal_nan=True)
    training = surfaces(path, 0, (1, 2), 3, 4)["training"]
    known = torch.cat([graph.target[graph.known] for graph in training])
    assert not any(bool(graph.known[3]) for graph in training)
    torch.testing.assert_close(torch.stack(torch.std_mean(known)), torch.tensor([1.0, 0.0]))
    np.savez(path, start=start)
    with pytest.raises(ValueError, match="lacks the arrays alpha"):
        read(path)


def test_models_are_invariant():
    """A motion or reflection of the protein changes nothing; a stretch does (negative control)."""
    protein, centre, potential = made(10, (12, 20), 40)["complexes"][0]
    protein = dataclasses.replace(protein, pos=centre + 0.1 * torch.randn_like(centre))  # without ties
    centre = centre + torch.randn_like(centre)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    for run in SurfacesStudy(**SMALL).runs():
        torch.manual_seed(0)
        model = build(run).eval()

        def out(by, model=model):
            moved = dataclasses.replace(protein, pos=protein.pos @ by + 3)
            return model(surface(moved, centre @ by + 3, potential, 4)).double()

        alone = out(torch.eye(3, dtype=torch.float64))
        for matrix in (turn, -turn):
            assert (out(matrix) - alone).abs().max() < 1e-4 * alone.abs().max(), run.models
        assert (out(turn @ torch.diag(torch.tensor([1.0, 1.1, 1.2])).double()) - alone).abs().max() > 1e-4, run.models
