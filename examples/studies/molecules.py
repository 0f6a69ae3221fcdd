"""Energies and forces of molecules in which atoms far apart along bonds meet: GPS layers and their global attention.

Trees of atoms with bonds of two kinds, and Lennard-Jones potentials between all other pairs (data/lennard_jones.py).
Models predict what is left of the energy once species and bonds are counted, and forces as its derivatives; they learn
from both. Messages pass along bonds, or (``--messages pairs``) along all pairs nearer than a cutoff; edges have the
kind of their bond and functions of their length. Beside them, at about equal numbers of parameters:

local only                none
Performer                 GPSConv, attn_type="performer"
dense                     GPSConv, attn_type="multihead"
ours                      RelativeGPSBlock, offset="distance", values="offset": near pairs of the attention are those
                          nearer than the cutoff; all others by random features
ours, exact               the same, all pairs exactly: method="pairs"
ours, far part off        the same, near pairs alone
SchNet                    torch_geometric's InteractionBlock, no attention; along pairs only

Layers are smooth, so that forces are continuous, but for the ReLU features of torch_geometric's Performer.

    python examples/studies/molecules.py                                        # minutes on two cores
    python examples/studies/molecules.py --messages pairs --models dense "ours, exact"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import torch
from baselines.graph_potentials import KINDS, Edges, GraphPotential
from data.lennard_jones import LENGTHS, SIZES, Molecules, lennard_jones
from harness import study
from harness.loading import Batches, graph_batches, parted
from harness.results import Row
from harness.settings import Settings
from harness.tables import at_best_rates, in_order, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit, parameters
from scipy.spatial.transform import Rotation
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import one_hot
from torch_geometric.data import Batch, Data

from tg_equiattn.graphs import neighbor_list

SEED = 45  # of the data, which do not depend on the seed of training
MODELS = {
    "local only": "none", "Performer": "performer", "dense": "multihead", "ours": "features", "ours, exact": "pairs",
    "ours, far part off": "near", "SchNet": "SchNet",
}  # fmt: skip
Model = Literal[
    "local only", "Performer", "dense", "ours", "ours, exact", "ours, far part off", "SchNet",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoleculesStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "molecules"
    SWEEP: ClassVar[tuple[str, ...]] = ("messages", "models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    messages: tuple[Edges, ...] = ("bonds",)
    """what messages pass along: bonds, or pairs nearer than the cutoff"""
    models: tuple[Model, ...] = tuple(MODELS)
    """which to train"""
    fewest: int = 20
    """atoms of a molecule"""
    most: int = 40
    """atoms of a molecule"""
    temperature: float = 0.5
    """of the configurations"""
    cutoff: float = 2.0
    """up to which distance pairs are near"""
    train: int = 400
    """molecules to train on; a quarter as many each to choose the epoch and to test"""
    channels: int = 32
    """width of ours; the others' are chosen for as many parameters"""
    layers: int = 2
    heads: int = 4
    """of attention"""
    epochs: int = 12
    batch: int = 8
    learning_rate: float = 0.01
    warmup: float = 0.2

    def check(self) -> None:
        super().check()
        if self.train < 4:
            raise ValueError(f"--train must be at least 4, got {self.train}")
        if self.most < max(2, self.fewest):
            raise ValueError(f"--most must be at least 2 and --fewest {self.fewest}, got {self.most}")

    def runs(self) -> Iterator[MoleculesStudy]:
        """SchNet is there along pairs only."""
        return (run for run in super().runs() if run.messages == ("pairs",) or run.models != ("SchNet",))


PRESETS = {
    "quick": MoleculesStudy(train=8, fewest=3, most=6, channels=8, layers=1, heads=2, epochs=1, batch=4),
    "study": MoleculesStudy(messages=("bonds", "pairs"), seeds=(0, 1, 2), results=study.committed("molecules")),
}


def build(settings: MoleculesStudy) -> GraphPotential:
    """The model, as wide as it takes to have as many parameters as ours."""
    (edges,), (name,) = settings.messages, settings.models

    def of(attention: str, channels: int) -> GraphPotential:
        shape = channels, settings.layers, settings.heads
        return GraphPotential(attention, edges, len(SIZES), *shape, settings.cutoff)

    attention = MODELS[name]
    wanted, width = parameters(of("features", settings.channels)), settings.channels
    if not name.startswith("ours"):  # SchNet's layers and PyG's Performer are not built on the meta device
        counted = "multihead" if attention == "performer" else attention
        widths = range(settings.channels, 3 * settings.channels + 1, settings.heads)
        width = min(widths, key=lambda channels: abs(parameters(of(counted, channels)) - wanted))
    return of(attention, width)


def graphs(molecules: Molecules, cutoff: float, explained: Tensor, units: tuple[float, float]) -> list[Data]:
    """Molecules with bonds, near pairs and targets: an energy (1,) and forces (N, 3), in their units."""
    found = []
    energies = (molecules.energies - composition(molecules) @ explained) / units[0]
    for species, bonds, pos, energy, forces in zip(*molecules[:3], energies, molecules.forces / units[1], strict=True):
        there = int((species >= 0).sum())
        pos, kinds = pos[:there], one_hot(bonds[:there, :there] + 1, 1 + KINDS)[..., 1:].float()
        bonded = torch.stack(tuple(kinds.sum(-1).nonzero().T)).flip(0)  # sources and targets, sorted by target
        pairs = neighbor_list(pos, cutoff)[0]
        found.append(Data(
            x=one_hot(species[:there], len(SIZES)).float(), pos=pos.float(), y=energy.float()[None],
            forces=forces[:there].float(), edge_index=bonded, edge_attr=kinds[tuple(bonded)],
            pair_index=pairs, pair_attr=kinds[tuple(pairs)],
        ))  # fmt: skip
    return found


def composition(molecules: Molecules) -> Tensor:
    """What needs no positions: how many atoms of each species and bonds of each kind there are, (B, 5)."""
    atoms = [(molecules.species == n).sum(1) for n in range(len(SIZES))]
    bonds = [(molecules.bonds == n).sum((1, 2)) / 2 for n in range(len(LENGTHS))]
    return torch.stack([*atoms, *bonds], 1).double()


def data(settings: MoleculesStudy) -> tuple[list[list[Data]], float]:
    """Molecules to train on, to choose the epoch and to test on; and the unit of energies in that of forces."""
    counts = settings.train, settings.train // 4, settings.train // 4
    every = lennard_jones(sum(counts), settings.fewest, settings.most, SEED, temperature=settings.temperature)
    parts = [Molecules(*part) for part in parted(every, counts)]
    first = parts[0]
    explained = torch.linalg.lstsq(composition(first), first.energies, driver="gelsd").solution
    spread = float((first.energies - composition(first) @ explained).std())
    force = float(first.forces[first.species >= 0].square().mean().sqrt())
    return [graphs(part, settings.cutoff, explained, (spread, force)) for part in parts], spread / force


class Potential(nn.Module):
    """A model of the energy, in units of the energies' spread and forces' as its derivatives.

    Args:
        energy: of the graphs of a batch, at positions.
        unit: of energies over that of forces.
    """

    def __init__(self, energy: GraphPotential, unit: float) -> None:
        super().__init__()
        self.energy, self.unit = energy, unit

    def forward(self, data: Batch) -> Tensor:
        """Energy of an atom's molecule and force, (N, 4)."""
        with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            data = data.clone()  # of tensors that have gradients
            pos = data.pos.requires_grad_()
            energy = self.energy(data, pos)  # in the unit of forces
            (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return torch.cat([(energy / self.unit)[data.batch, None], -slope], 1)


def predict(model: Potential, data: Batch) -> tuple[Tensor, Tensor]:
    """Predicted and true energy of an atom's molecule and force, (N, 4), in units of their spread."""
    return model(data), torch.cat([data.y[data.batch, None], data.forces], 1)


def measures(model: Potential, testing: Batches) -> dict[str, float]:
    """Squared errors as shares of the variance; and how much turning molecules changes predicted forces, as a share of
    them."""
    model.eval()
    turn = torch.tensor(Rotation.random(rng=np.random.default_rng(SEED)).as_matrix(), dtype=torch.float32)
    found: dict[str, list[Tensor]] = {"out": [], "target": [], "energy": [], "known": [], "turned": []}
    for batch in testing.whole():
        out, target = (x.detach() for x in predict(model, batch))
        first = batch.ptr[:-1]
        here = batch.clone()
        here.pos = batch.pos @ turn.to(batch.pos).T
        turned = model(here).detach()[:, 1:] @ turn.to(batch.pos)
        for name, x in zip(found, (out[:, 1:], target[:, 1:], out[first, 0], batch.y, turned), strict=True):
            found[name].append(x)
    out, target, energy, known, turned = (torch.cat(x) for x in found.values())
    return {
        "energy": float((energy - known).square().mean() / known.var()),
        "force": float((out - target).square().mean() / target.square().mean()),
        "turned": float(((turned - out).square().mean() / out.square().mean()).sqrt()),
    }


def train(settings: MoleculesStudy) -> Outcome:
    """One model, trained and tested."""
    parts, unit = data(settings)
    model = Potential(build(settings), unit)
    device = settings.device
    training = graph_batches(parts[0], settings.batch, device, settings.seed)
    validation, testing = (graph_batches(part, 50, device) for part in parts[1:])
    learner = Regressor(model, predict, settings)
    outcome = fit(learner, training, validation, testing)
    outcome.more |= measures(learner.model.to(device), testing)
    return outcome


def table(rows: list[Row]) -> str:
    """Shares of the variance that remain, and what turning does, at the learning rates that validation data choose."""
    lines = []
    for (messages, name), group in at_best_rates(rows, "messages", "models").items():
        cells = [mean_and_spread((row.more[part] for row in group), 4) for part in ("energy", "force")]
        turned = max(row.more["turned"] for row in group)
        sizes = f"{group[0].parameters:,}", f"{np.mean([row.seconds for row in group]):.0f}"
        rate = f"{group[0].setting('learning_rate'):g}"
        lines.append([messages, name, rate, *cells, f"{turned:.0e}", *sizes])
    header = ["messages along", "model", "rate", "energy", "force", "change by turning", "parameters", "seconds"]
    return markdown(header, lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of errors."""
    return {"errors": table(in_order(rows, messages=Edges.__args__, models=MODELS))}


if __name__ == "__main__":
    study.main(MoleculesStudy(), PRESETS, __doc__, train, report)
