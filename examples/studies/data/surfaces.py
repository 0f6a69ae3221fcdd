"""Electrostatic potentials around proteins: graphs of residues with what is known of them, read or synthetic."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .protein_graphs import UNIT, Graph, graph_of
from .proteins import Protein, synthetic

SETS = "training", "validation", "chains", "larger", "complexes"
FORMAL = torch.zeros(20).scatter(0, torch.tensor([1, 3, 6, 11]), torch.tensor([1.0, -1.0, -1.0, 1.0]))  # R D E K
SCREENING = 3.0, 6.0, 12.0, 24.0, float("inf")  # lengths in angstroms
NET, POTENTIALS = slice(0, 2), slice(2, 7)  # columns of hand-made inputs


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Surface(Graph):
    """A graph whose ``pos`` are centres of residues; ``target`` (N, 1) are potentials, ``known`` (N, 1) where they are.

    Edges join nearest C-alpha atoms, and the third of the ``frames`` leads from C-alpha to the centre. ``inputs``
    (N, 7) are hand-made: net formal charge of the protein, also over its radius, and potentials of formal charges.
    """

    inputs: Tensor


def potentials(residue: Tensor, pos: Tensor) -> Tensor:
    """Screened potentials of the formal charges of all other residues at each, (N, 5), per ten angstroms."""
    distance = torch.cdist(pos, pos).fill_diagonal_(torch.inf)
    kernels = [(-distance / length).exp() / distance if length < np.inf else 1 / distance for length in SCREENING]
    return UNIT * torch.stack([kernel @ FORMAL[residue].to(pos.dtype) for kernel in kernels], 1)


def surface(protein: Protein, centre: Tensor, potential: Tensor, neighbors: int) -> Surface:
    """The graph of a protein with C-alpha atoms at ``pos``, from centres in angstroms and potentials (NaN: unknown)."""
    graph = graph_of(protein, neighbors)
    net, radius = float(FORMAL[protein.residue].sum()) / 10, float(graph.size[0, 1].exp())
    known = potential.isfinite()[:, None]
    whole = torch.tensor([net, net / radius]).expand(len(protein), 2)
    frames = torch.cat([graph.frames[:, :2], (centre - protein.pos)[:, None].float() / 3], 1)
    inputs = torch.cat([whole, potentials(protein.residue, centre)], 1).float()
    fields = {f.name: getattr(graph, f.name) for f in dataclasses.fields(Graph)}
    fields |= {"pos": (centre / UNIT).float(), "frames": frames, "known": known, "inputs": inputs}
    return Surface(**fields | {"target": potential.nan_to_num()[:, None].float()})


def read(path: Path) -> dict[str, list[tuple[Protein, Tensor, Tensor]]]:
    """Proteins, centres and potentials by set, from the file that make_surfaces.py makes.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file without these arrays.
    """
    with np.load(path) as file:
        missing = {"start", "name", "set", "residue", "chain", "alpha", "centre", "potential"} - set(file)
        if missing:
            raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}: make it with make_surfaces.py")
        arrays = {name: file[name] for name in file}
    found: dict[str, list] = {name: [] for name in SETS}
    for n, name in enumerate(arrays["name"]):
        part = slice(*arrays["start"][n : n + 2])
        residue, chain, alpha, centre, potential = (
            torch.from_numpy(arrays[key][part]) for key in ("residue", "chain", "alpha", "centre", "potential")
        )
        protein = Protein(str(name), residue.long(), torch.arange(len(residue)), chain.long(), alpha)
        index = torch.cat([torch.zeros(1), torch.where(protein.follows, 1, 10).cumsum(0)]).long()
        found[str(arrays["set"][n])].append((dataclasses.replace(protein, index=index), centre, potential))
    return found


def made(count: int, residues: tuple[int, int], larger: int) -> dict[str, list[tuple[Protein, Tensor, Tensor]]]:
    """Random chains whose potential is that of their formal charges, half screened."""
    kinds = [(*residues, 1), (*residues, 1), (*residues, 1), (residues[1] + 1, larger, 1), (*residues, 2)]
    found = {}
    for seed, (name, kind) in enumerate(zip(SETS, kinds, strict=True)):
        proteins = synthetic(max(2, count // 5), *kind[:2], seed, kind[2])
        found[name] = [(p, p.pos, potentials(p.residue, p.pos)[:, [2, 4]].sum(1)) for p in proteins]
    return found


@functools.cache
def surfaces(
    data: Path | None, synthetic_count: int, residues: tuple[int, int], larger: int, neighbors: int
) -> dict[str, list[Surface]]:
    """Graphs by set, with potentials in units of their standard deviation in training, from their mean there."""
    found = read(data) if data is not None else made(synthetic_count, residues, larger)
    known = torch.cat([potential[potential.isfinite()] for _, _, potential in found["training"]])
    spread, mean = torch.std_mean(known)
    return {
        name: [surface(protein, centre, (x - mean) / spread, neighbors) for protein, centre, x in part]
        for name, part in found.items()
    }
