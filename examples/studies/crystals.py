"""Energies and forces of crystals of soft charges, and of open clouds: messages with a cutoff, and Ewald attention.

Neutral charges at random places in skewed cells of 32 that repeat in all directions; energies and forces are those of
Ewald's sum (data/periodic_charges.py). The models are those of long_range.py, here with the images of atoms as
neighbors: two layers of messages between charges nearer than a cutoff, and between them nothing or Ewald attention
with ``cell=``, of all atoms and all their images.

They learn the energy and, as its derivatives, the forces. Each is tested on other cells; on the same with every atom
moved by lattice vectors, and described by another cell of the same lattice; on their supercells, 2 x 1 x 1 and
2 x 2 x 2, in which an atom has the energy that it had; on larger cells that repeat nothing; and on open clouds, the
same charges at the same places without images. With ``--trained-on clouds`` a model learns from open clouds, with
``both`` from half as many of each, and is tested on all of these: two charges have one energy, erf(r / 2 s) / r times
both, wherever they are.

    python examples/studies/crystals.py                    # minutes on two cores
    python examples/studies/crystals.py --operators EwaldAttention --trained-on clouds
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from baselines.message_passing import HIDDEN, ChannelwiseMessagePassing
from data.periodic_charges import Crystals, in_another_cell, moved, opened, periodic_charges, repeated, widths
from e3nn import o3
from harness import study
from harness.figures import points
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit
from long_range import AVG_NUM_NODES
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention
from torch import Tensor, nn

SEED = 47  # of the data, which do not depend on the seed of training
Operator = Literal["none", "EwaldAttention"]
Kind = Literal["crystals", "clouds", "both"]
ERROR = 0.01  # promised of attention's Ewald sums; energies of an atom were found within 1e-6
FAR = 1e3  # beyond all clouds
FEW = 16  # cells that changes are measured on, in float64, too
SUPERCELLS = {"2 x 1 x 1": (2, 1, 1), "2 x 2 x 2": (2, 2, 2)}
TESTS = "cells", "atoms moved", "another cell", *SUPERCELLS, "larger cells"
KINDS = {"crystals": ("cells", "larger cells"), "clouds": ("clouds", "larger clouds")}  # what is tested of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrystalsStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "crystals"
    SWEEP: ClassVar[tuple[str, ...]] = ("operators", "cutoff", "trained_on", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    operators: tuple[Operator, ...] = Operator.__args__
    """what stands between the two layers of messages"""
    cutoff: tuple[float, ...] = (2.0,)
    """up to which distance messages pass"""
    trained_on: tuple[Kind, ...] = ("crystals",)
    """whose energies and forces are learned: crystals, the charges of their cells as open clouds, or half and half"""
    charges: int = 32
    """in every cell, an even number"""
    side: float = 7.0
    """of the cube that has the volume of a cell"""
    softness: float = 0.5
    """standard deviation of a charge"""
    width: float = 1.0
    """of attention's narrowest kernel: half the cutoff"""
    max_width: float = 8.0
    """of its widest"""
    train: int = 512
    """cells to train on; a quarter as many each to choose the epoch and to test"""
    epochs: int = 10
    batch: int = 8
    learning_rate: float = 0.05
    clip: float = 1.0
    warmup: float = 0.3

    def check(self) -> None:
        super().check()
        for name in ("charges", "side", "softness", "width", "max_width", "train"):
            self.positive(name)
        if self.charges % 2:
            raise ValueError(f"--charges must be even (crystals are neutral), got {self.charges}")
        if min(self.cutoff) <= 0:
            raise ValueError(f"--cutoff must be positive, got {list(self.cutoff)}")
        if self.train < 4:
            raise ValueError(f"--train must be at least 4, got {self.train}")


PRESETS = {
    "quick": CrystalsStudy(train=8, charges=4, side=3.5, epochs=1, batch=4),
    "study": CrystalsStudy(seeds=(0, 1, 2), results=study.committed("crystals")),
}


class Model(nn.Module):
    """Linear, message passing, attention with a residual, message passing, Linear: a potential at every charge.

    Args:
        settings: of the example.
    """

    def __init__(self, settings: CrystalsStudy) -> None:
        super().__init__()
        (operator,), (self.cutoff,) = settings.operators, settings.cutoff
        near = max(1.0, settings.charges / settings.side**3 * 4 / 3 * math.pi * self.cutoff**3)
        self.embed = o3.Linear("0e", HIDDEN)
        self.first = ChannelwiseMessagePassing(HIDDEN, self.cutoff, near)
        self.attention = None
        if operator == "EwaldAttention":
            self.attention = IrrepsEwaldAttention(
                HIDDEN, HIDDEN, width=settings.width, max_width=settings.max_width, avg_num_nodes=AVG_NUM_NODES,
                error=ERROR,
            )  # fmt: skip
        self.second = ChannelwiseMessagePassing(HIDDEN, self.cutoff, near)
        self.out = o3.Linear(HIDDEN, "0e")

    def forward(self, charges: Tensor, positions: Tensor, cells: Tensor) -> Tensor:
        """Charges (B, N) at positions (B, N, 3) in cells (B, 3, 3), which are zero for open clouds, to the energy of
        each (B,)."""
        count, size = charges.shape
        near, shift = edges(positions, cells, self.cutoff)
        pos = positions.flatten(0, 1)
        x = self.first(self.embed(charges.flatten()[:, None]), pos, near, shift)
        if self.attention is not None:
            batch = torch.arange(count, device=charges.device).repeat_interleave(size)
            x = x + self.attention(x, pos, batch, cell=cells)
        return (charges * self.out(self.second(x, pos, near, shift)).view(count, size)).sum(1)


def edges(positions: Tensor, cells: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Charges and images of charges nearer than the radius, of each crystal or open cloud: indices of source and
    target, (2, E), and what brings the source to its image, (E, 3)."""
    size, (positions, cells) = positions.shape[1], (positions.detach(), cells.detach())
    is_open = (cells == 0).flatten(1).all(1)
    cells = torch.where(is_open[:, None, None], FAR * torch.eye(3).to(cells), cells)  # no image is near
    fractions = positions @ torch.linalg.inv(cells)
    nearest = fractions[:, None] - fractions[:, :, None]  # from the target, the first index, to the source
    wrap = -nearest.round()
    reach = int((radius / widths(cells).min() + 0.5).floor())  # images n cells on are |n| - 1/2 widths away or more
    numbers = torch.cartesian_prod(*[torch.arange(-reach, reach + 1.0, device=cells.device)] * 3).to(cells).view(-1, 3)
    apart = (nearest + wrap)[:, :, :, None] + numbers
    near = torch.einsum("bijnx,bxd->bijnd", apart, cells).square().sum(-1) < radius**2
    itself = torch.eye(size, dtype=torch.bool, device=cells.device)[:, :, None] & (numbers == 0).all(1)
    box, target, source, image = (near & ~itself).nonzero().T
    shift = torch.einsum("ex,exd->ed", wrap[box, target, source] + numbers[image], cells[box])
    return torch.stack([source, target]) + size * box, shift


def predict(model: Model, data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted and true targets of every charge, (B, N, 4): the energy of its cell over the root of their number, and
    its force, in one unit."""
    charges, positions, cells, target = data
    with torch.inference_mode(False), torch.enable_grad():
        charges, cells, positions = charges.clone(), cells.clone(), positions.clone().requires_grad_()
        energy = model(charges, positions, cells)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=model.training)
    per_root = (energy / math.sqrt(charges.shape[1]))[:, None, None].expand(*charges.shape, 1)
    return torch.cat([per_root, -slope], 2), target


@dataclasses.dataclass(frozen=True)
class Units:
    """In which energies and forces are learned.

    Args:
        origin: energy of an atom from which energies count.
        scale: of both.
    """

    origin: float
    scale: float

    @classmethod
    def of(cls, part: Crystals) -> Units:
        """Such that energies vary about zero, and the mean square of forces is 1."""
        size = part.charges.shape[1]
        return cls(float(part.energies.mean()) / size, float(part.forces.square().mean().sqrt()))

    def tensors(self, part: Crystals, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Charges, positions, cells and targets as :func:`predict` has them."""
        size = part.charges.shape[1]
        energies = (part.energies / size - self.origin) * math.sqrt(size)
        target = torch.cat([energies[:, None, None].expand(-1, size, 1), part.forces], 2) / self.scale
        return [x.to(dtype) for x in (part.charges, part.positions, part.cells, target)]

    def energies(self, out: Tensor) -> Tensor:
        """Of an atom, (B,)."""
        return out[:, 0, 0] * self.scale / math.sqrt(out.shape[1]) + self.origin


def predictions(model: Model, data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """:func:`predict`, in batches of about a thousand charges."""
    step = max(1, 1024 // data[0].shape[1])
    pairs = [predict(model, [x[n : n + step] for x in data]) for n in range(0, len(data[0]), step)]
    out, target = (torch.cat([pair[n].detach() for pair in pairs]) for n in (0, 1))
    return out, target


def crystals(settings: CrystalsStudy) -> list[Crystals]:
    """Those to train on, to choose the epoch, to test on; and larger cells."""
    counts = settings.train, settings.train // 4, settings.train // 4
    every = periodic_charges(sum(counts), settings.charges, settings.side, settings.softness, SEED)
    side = 2 ** (1 / 3) * settings.side
    larger = periodic_charges(counts[2], 2 * settings.charges, side, settings.softness, SEED + 1)
    return [*(Crystals(*part) for part in zip(*(x.split(counts) for x in every), strict=True)), larger]


def in_part_opened(part: Crystals, kept: float, softness: float) -> Crystals:
    """This share of the crystals, and then the others as open clouds."""
    count = round(kept * len(part.charges))
    others = opened(Crystals(*(x[count:] for x in part)), softness)
    return Crystals(*(torch.cat([x[:count], y]) for x, y in zip(part, others, strict=True)))


def same(part: Crystals) -> dict[str, Crystals]:
    """These crystals, described otherwise."""
    others = {"atoms moved": moved(part, SEED), "another cell": in_another_cell(part)}
    return others | {name: repeated(part, times) for name, times in SUPERCELLS.items()}


def errors(model: Model, part: Crystals, units: Units) -> tuple[float, float]:
    """Mean absolute errors of an atom's energy and of a component of its force."""
    out, target = predictions(model, units.tensors(part))
    energy = (units.energies(out) - units.energies(target)).abs().mean()
    return float(energy), float((out - target)[..., 1:].abs().mean()) * units.scale


def scatter(model: Model, part: Crystals, units: Units) -> float:
    """Mean absolute error of an atom's energy about the mean error, as energies count from anywhere."""
    out, target = predictions(model, units.tensors(part))
    error = units.energies(out) - units.energies(target)
    return float((error - error.mean()).abs().mean())


def change(model: Model, part: Crystals, other: Crystals, units: Units) -> float:
    """The largest change of an atom's energy or of its force, each as a share of the largest that is predicted."""
    dtype, found = next(model.parameters()).dtype, []
    for crystals in (part, other):
        out, _ = predictions(model, units.tensors(crystals, dtype))
        found.append((out[:, 0, 0] / math.sqrt(out.shape[1]), out[..., 1:]))
    (energies, forces), (other_energies, other_forces) = found
    forces = forces.repeat(1, other_forces.shape[1] // forces.shape[1], 1)
    pairs = (energies, other_energies), (forces, other_forces)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def train(settings: CrystalsStudy) -> Outcome:
    """One model, trained, and tested on what it should and should not tell apart."""
    *parts, larger = crystals(settings)
    testing, softness = parts[2], settings.softness
    tests = {"cells": testing, **same(testing), "larger cells": larger}
    tests |= {"clouds": opened(testing, softness), "larger clouds": opened(larger, softness)}
    (kind,) = settings.trained_on
    kept = {"crystals": 1.0, "both": 0.5, "clouds": 0.0}[kind]
    parts = [in_part_opened(part, kept, softness) for part in parts]
    units = Units.of(parts[0])
    data = [units.tensors(part) for part in parts]
    training = tensor_batches(data[0], settings.batch, settings.seed, device=settings.data_device)
    held_out = [tensor_batches(part, 32, device=settings.data_device) for part in data[1:]]
    learner = Regressor(Model(settings), predict, settings)
    outcome = fit(learner, training, *held_out)
    model = learner.model.cpu()
    found = {name: errors(model, part, units) for name, part in tests.items()}
    about = {name: scatter(model, tests[name], units) for names in KINDS.values() for name in names}
    few = Crystals(*(x[:FEW] for x in testing))
    changes = {
        name: [change(model.to(dtype), few, other, units) for dtype in (torch.float32, torch.float64)]
        for name, other in same(few).items()
    }
    mean = {
        name: (
            float((part.energies - part.energies.mean()).abs().mean()) / part.charges.shape[1],
            float(part.forces.abs().mean()),
        )
        for name, part in tests.items()
    }
    outcome.metric, outcome.value = "energy error", found["clouds" if kind == "clouds" else "cells"][0]
    outcome.more |= {"errors": found, "scatter": about, "changes": changes, "mean": mean}
    return outcome


def label(name: str, cutoff: float) -> str:
    """With the cutoff of messages where it is not the usual one."""
    other = "" if (cutoff,) == CrystalsStudy.cutoff else f", messages up to {cutoff:g}"
    return name + other


def table(rows: list[Row], part: int) -> str:
    """Mean absolute errors of an atom's energy, or of a component of its force, by model and test."""
    digits = (5, 4)[part]
    without = rows[0].more["mean"]
    means = (f"{without[test][part]:.{digits}f}" if test in without else "-" for test in TESTS)
    lines = [[("the mean energy", "no forces")[part], *means]]
    for key, group in grouped(rows, "operators", "cutoff").items():
        found = ([row.more["errors"][test][part] for row in group] for test in TESTS)
        lines.append([label(*key), *(mean_and_spread(values, digits) for values in found)])
    return markdown(["global context", *TESTS], lines)


def transfer(rows: list[Row]) -> str:
    """Mean absolute errors of models of crystals on clouds, and the other way round."""
    tests = [test for kind in KINDS.values() for test in kind]
    lines = []
    for part, what in enumerate(("energy", "force")):
        digits = (5, 4)[part]
        mean = [f"{rows[0].more['mean'][test][part]:.{digits}f}" for test in tests]
        lines.append([what, ("the mean energy", "no forces")[part], "-", *mean])
        for (*key, trained_on), group in grouped(rows, "operators", "cutoff", "trained_on").items():
            found = ([row.more["errors"][test][part] for row in group] for test in tests)
            lines.append([what, label(*key), trained_on, *(mean_and_spread(values, digits) for values in found)])
    for (*key, trained_on), group in grouped(rows, "operators", "cutoff", "trained_on").items():
        found = ([row.more["scatter"][test] for row in group] for test in tests)
        cells = (mean_and_spread(values, 5) for values in found)
        lines.append(["energy, about its mean error", label(*key), trained_on, *cells])
    return markdown(["error of", "global context", "trained on", *tests], lines)


def changes(rows: list[Row]) -> str:
    """The largest, by model and description, in float32 and float64; and what each model takes."""
    lines, same = [], TESTS[1:-1]
    for (*key, rate), group in grouped(rows, "operators", "cutoff", "learning_rate").items():
        pairs = (zip(*(row.more["changes"][test] for row in group), strict=True) for test in same)
        cells = [" / ".join(f"{max(values):.0e}" for values in pair) for pair in pairs]
        seconds = f"{np.mean([row.seconds for row in group]):.0f}"
        lines.append([label(*key), *cells, f"{rate:g}", f"{group[0].parameters:,}", seconds])
    return markdown(["global context", *same, "learning rate", "parameters", "seconds"], lines)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """The tables, and a figure."""
    of_crystals = [row for row in rows if row.setting("trained_on") == "crystals"]
    columns: dict[str, dict[str, list[float]]] = {}
    for test in TESTS:
        column = columns.setdefault(test.replace(" x ", "x"), {})
        for key, group in grouped(of_crystals, "operators", "cutoff").items():
            column[label(*key)] = [row.more["errors"][test][0] for row in group]
    tables: dict[str, str] = {}
    if of_crystals:
        points(columns, folder / "errors.png", "energy: mean absolute error", "", "global context", "log")
        tables = {"energies": table(of_crystals, 0), "forces": table(of_crystals, 1), "changes": changes(of_crystals)}
    of_both = [row for kind in Kind.__args__ for row in rows if row.setting("trained_on") == kind]
    of_both = [row for row in of_both if "scatter" in row.more]
    return tables | ({"transfer": transfer(of_both)} if of_both else {})


if __name__ == "__main__":
    study.main(CrystalsStudy(), PRESETS, __doc__, train, report)
