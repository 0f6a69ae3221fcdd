"""Graphs of residues, and batches of them with what is to be predicted."""

from __future__ import annotations

import dataclasses
import math

import torch
from scipy.spatial import cKDTree
from torch import Tensor

from .proteins import Protein, drag, response

UNIT = 10.0  # angstroms; the unit of length of the models
SEPARATIONS = 4  # along the chain, up to which messages tell residues apart
CLASSES = 2 * SEPARATIONS + 2  # the last is another chain, or farther
NEAR, FAR = 8.0, 25.0  # angstroms from the push, beyond which errors are measured


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Residues of one or more proteins, lengths in units of ten angstroms.

    ``frames`` (N, 3, 3) are three vectors of each residue: to the next, to the one before it, and from the middle of
    its protein, in units of the radius of gyration; ``size`` (N, 2) are logarithms of the number of residues and of
    that radius. ``push`` (N, 3) is a force, ``target`` (N, 3) the displacements, ``known`` (N, 2) where
    errors are measured: everywhere that counts, and far away. In a flow, ``push`` is the velocity and ``target`` the
    forces.
    """

    residue: Tensor
    size: Tensor
    pos: Tensor
    frames: Tensor
    index: Tensor
    chain: Tensor
    batch: Tensor
    edge_index: Tensor
    edge_class: Tensor
    edge_length: Tensor
    edge_unit: Tensor
    push: Tensor
    target: Tensor
    known: Tensor
    count: int = 1

    def to(self, device: torch.device | str, *_: object, **__: object) -> Graph:
        """The graph on a device."""
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "count"}
        return dataclasses.replace(self, **{name: x.to(device) for name, x in tensors.items()})

    @property
    def mark(self) -> Tensor:
        """1 at the pushed residues, (N, 1)."""
        return self.push.square().sum(1, keepdim=True)

    @property
    def edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sources and targets (2, E), classes, lengths and directions of the edges."""
        return self.edge_index, self.edge_class, self.edge_length, self.edge_unit


def separations(index: Tensor, chain: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Classes of pairs by their separation along the chain."""
    apart = index[source] - index[target]
    near = (chain[source] == chain[target]) & (apart.abs() <= SEPARATIONS)
    return torch.where(near, apart + SEPARATIONS, CLASSES - 1)


def graph_of(protein: Protein, neighbors: int) -> Graph:
    """The graph of a protein, with edges from the nearest residues; nothing is pushed and nothing to be predicted."""
    pos, count = protein.pos / UNIT, len(protein)
    nearest = cKDTree(protein.pos.numpy()).query(protein.pos.numpy(), min(neighbors + 1, count))[1]
    source = torch.from_numpy(nearest[:, 1:])
    target = torch.arange(count)[:, None].expand_as(source)
    source, target = source.flatten(), target.flatten()
    offset = pos[source] - pos[target]
    length = offset.norm(dim=1)
    steps = pos.diff(dim=0) * protein.follows[:, None] * (UNIT / 3.8)
    zero = torch.zeros(1, 3, dtype=pos.dtype)
    centred = pos - pos.mean(0)
    radius = centred.square().sum(1).mean().sqrt()
    frames = torch.stack([torch.cat([steps, zero]), torch.cat([zero, -steps]), centred / radius], 1)
    size = torch.tensor([math.log(count / 100), float(radius.log())])
    return Graph(
        residue=protein.residue, size=size.expand(count, 2), pos=pos.float(),
        frames=frames.float(), index=protein.index, chain=protein.chain,
        batch=torch.zeros(count, dtype=torch.int64), edge_index=torch.stack([source, target]),
        edge_class=separations(protein.index, protein.chain, source, target), edge_length=length.float(),
        edge_unit=(offset / length[:, None]).float(), push=torch.zeros(count, 3), target=torch.zeros(count, 3),
        known=torch.ones(count, 2, dtype=torch.bool),
    )  # fmt: skip


def joined(graphs: list[Graph]) -> Graph:
    """One graph of several."""
    first = torch.tensor([0, *(len(graph.residue) for graph in graphs)]).cumsum(0)
    every = {f.name: [getattr(graph, f.name) for graph in graphs] for f in dataclasses.fields(graphs[0])}
    every["batch"] = [torch.full_like(x, n) for n, x in enumerate(every["batch"])]
    every["edge_index"] = [x + n for n, x in zip(first, every["edge_index"], strict=False)]
    tensors = {name: torch.cat(x, 1 if name == "edge_index" else 0) for name, x in every.items() if name != "count"}
    return dataclasses.replace(graphs[0], **tensors, count=len(graphs))


def pushed(graph: Graph, responses: Tensor, place: int, force: Tensor) -> Graph:
    """One residue is pushed; displacements, whose mean square beyond ``NEAR`` is made 1, are to be predicted."""
    target = responses[:, :, place].to(force.dtype) @ force
    far = UNIT * (graph.pos - graph.pos[place]).norm(dim=1)
    known = torch.stack([far > NEAR, far > FAR], 1)
    target = target / target[known[:, 0]].square().mean().sqrt()
    push = torch.zeros_like(graph.push)
    push[place] = force
    return dataclasses.replace(graph, push=push, target=target, known=known)


class Pushes:
    """Proteins of an elastic network, with a residue and a direction drawn for each.

    Responses to all forces are kept in float32, which takes 36 N^2 bytes a protein.
    """

    def __init__(self, proteins: list[Protein], neighbors: int) -> None:
        self.graphs = [graph_of(protein, neighbors) for protein in proteins]
        self.responses = [response(protein.pos).float() for protein in proteins]

    def __len__(self) -> int:
        return len(self.graphs)

    def draw(self, number: int, generator: torch.Generator) -> Graph:
        graph = self.graphs[number]
        place = int(torch.randint(len(graph.residue), (1,), generator=generator))
        force = torch.randn(3, generator=generator)
        return pushed(graph, self.responses[number], place, force / force.norm())


class Drags:
    """Proteins that move through a fluid, with a direction drawn for each.

    The forces, less the share along the motion that all residues have in common, are to be predicted; their mean square
    is made 1.
    """

    def __init__(self, proteins: list[Protein], neighbors: int) -> None:
        self.graphs = [graph_of(protein, neighbors) for protein in proteins]
        forces = [drag(protein.pos) for protein in proteins]
        self.forces = [(f - f.diagonal(dim1=1, dim2=2).mean() * torch.eye(3, dtype=f.dtype)).float() for f in forces]

    def draw(self, number: int, generator: torch.Generator) -> Graph:
        graph, velocity = self.graphs[number], torch.randn(3, generator=generator)
        velocity = velocity / velocity.norm()
        target = self.forces[number] @ velocity
        target = target / target.square().mean().sqrt()
        return dataclasses.replace(graph, push=velocity.expand(len(target), 3), target=target)


def pair_geometry(graph: Graph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :attr:`Graph.edges`, of all pairs of residues of a protein."""
    device = graph.pos.device
    sizes = torch.bincount(graph.batch, minlength=graph.count)
    starts = sizes.cumsum(0) - sizes
    pairs = sizes.square()
    graph_of_pair = torch.arange(graph.count, device=device).repeat_interleave(pairs)
    number = torch.arange(int(pairs.sum()), device=device) - (pairs.cumsum(0) - pairs)[graph_of_pair]
    target, source = number // sizes[graph_of_pair], number % sizes[graph_of_pair]
    edge_index = (torch.stack([source, target]) + starts[graph_of_pair])[:, source != target]
    source, target = edge_index
    offset = graph.pos[source] - graph.pos[target]
    length = offset.norm(dim=1)
    kind = separations(graph.index, graph.chain, source, target)
    return edge_index, kind, length, offset / length[:, None]
