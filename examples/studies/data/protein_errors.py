"""Errors of models of proteins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .protein_graphs import UNIT, Graph, joined
from .protein_sets import Drawn, answered, without_order
from .proteins import Protein, rigid_motions, stiffness

SPACE = (8, 12, 16, 20, 25, 30, 40, 60)  # angstroms from the push, bins of the figure
ALONG = (1, 4, 8, 16, 32, 64, 128, 256)  # residues from the push, likewise
MOTIONS = (0.0, 1.0, 2.0, 4.0, np.inf)  # angstroms, sizes of the motion by which binding is reported
MODES = 20  # of the elastic network, that are fitted to the answer


def on_cpu(found: Drawn) -> Iterator[Graph]:
    """Batches of a set, once, on the CPU, where models are after training."""
    return (graph.to("cpu") for graph in found.whole())


def response_errors(model: nn.Module, found: Drawn, ordered: bool = True) -> dict[str, Any]:
    """Squared errors relative to those of zero: beyond 8 and 25 angstroms, and in bins of distance and separation."""
    bins = {"space": (SPACE, []), "along": (ALONG, [])}
    sums = {name: np.zeros((2, len(edges) - 1)) for name, (edges, _) in bins.items()}
    beyond = np.zeros((2, 2))
    for graph in on_cpu(found):
        graph = graph if ordered else without_order(graph)
        with torch.no_grad():
            out = model(graph)
        squares = torch.stack([(out - graph.target).square().sum(1), graph.target.square().sum(1)]).double()
        place = graph.mark[:, 0].nonzero()[:, 0][graph.batch]
        distance = UNIT * (graph.pos - graph.pos[place]).norm(dim=1)
        apart = (graph.index - graph.index[place]).abs().where(graph.chain == graph.chain[place], 0)
        for n in range(2):
            beyond[:, n] += squares[:, graph.known[:, n]].sum(1).numpy()
        for name, x in (("space", distance), ("along", apart)):
            for n, (low, high) in enumerate(zip(bins[name][0], bins[name][0][1:], strict=False)):
                sums[name][:, n] += squares[:, graph.known[:, 0] & (x >= low) & (x < high)].sum(1).numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        curves = {name: (some[0] / some[1]).round(4).tolist() for name, some in sums.items()}
        return {"beyond": (beyond[0] / beyond[1]).round(5).tolist(), **curves}


def turned(graph: Graph, matrix: Tensor, shift: Tensor) -> Graph:
    """The graph moved and turned or mirrored."""
    changes = {name: getattr(graph, name) @ matrix.T for name in ("frames", "edge_unit", "push", "target")}
    return dataclasses.replace(graph, pos=graph.pos @ matrix.T + shift, **changes)


def changes(model: nn.Module, graph: Graph) -> dict[str, float]:
    """Largest changes of displacements, relative to the largest, where a protein is moved, turned and mirrored; in
    float64."""
    names = [f.name for f in dataclasses.fields(graph) if f.name != "count"]
    tensors = {name: getattr(graph, name) for name in names}
    graph = dataclasses.replace(graph, **{name: x.double() for name, x in tensors.items() if x.is_floating_point()})
    model = model.double()
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double())
    rotation = rotation * rotation.det().sign()
    still, none = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    ways = {"moved": (still, none + 7.0), "turned": (rotation, none), "mirrored": (-rotation, none)}
    with torch.no_grad():
        out = model(graph)
        found = {
            name: float((model(turned(graph, matrix, shift)) - out @ matrix.T).abs().max() / out.abs().max())
            for name, (matrix, shift) in ways.items()
        }
    model.float()
    return found


def elastic_modes(protein: Protein, displacement: Tensor) -> Tensor:
    """The displacement (N, 3) as the softest modes of the elastic network fit it best, known where it is finite."""
    _, modes = torch.linalg.eigh(stiffness(protein.pos))
    basis = torch.cat([rigid_motions(protein.pos), modes[:, 6 : 6 + MODES]], 1).unflatten(0, (-1, 3))
    known = displacement.isfinite().all(1)
    fit_to = torch.linalg.lstsq(basis[known].flatten(0, 1), displacement[known].flatten()[:, None], driver="gelsd")
    return (basis.flatten(0, 1) @ fit_to.solution).view(-1, 3)


def binding_errors(model: nn.Module, found: tuple[Protein, ...], neighbors: int) -> dict[str, list[Any]]:
    """Squares of the displacement, of the model's errors and of the elastic modes' errors by size of the motion."""
    sums = np.zeros((len(MOTIONS) - 1, 3))
    counts = np.zeros(len(MOTIONS) - 1)
    for protein in found:
        graph = answered(protein, "binding", neighbors)
        if graph is None:
            continue
        known = graph.known[:, 0]
        with torch.no_grad():
            out = model(joined([graph]))
        fitted = elastic_modes(protein, protein.bound - protein.pos).float()
        target = graph.target[known]
        squares = [target.square(), (out[known] - target).square(), (fitted[known] - target).square()]
        motion = float(target.square().sum(1).mean().sqrt())
        place = int(np.searchsorted(MOTIONS, motion, side="right")) - 1
        sums[place] += [float(x.sum()) for x in squares]
        counts[place] += 1
    return {"squares": sums.round(4).tolist(), "proteins": counts.tolist()}


def correlations(model: nn.Module, found: Drawn) -> list[float]:
    """Correlation of each chain's predicted and measured B-factors."""
    values = []
    for graph in on_cpu(found):
        with torch.no_grad():
            out = model(graph)
        for n in range(graph.count):
            here = graph.batch == n
            values.append(float(torch.corrcoef(torch.stack([out[here, 0], graph.target[here, 0]]))[0, 1]))
    return values
