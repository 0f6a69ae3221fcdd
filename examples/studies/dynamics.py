"""Dynamics at constant energy: which operators' forces keep the energy.

The models of long_range.py (messages of short range, an operator with global context or none) learn energies and forces
of neutral clouds of soft charges. Then charges of mass 1 move by velocity Verlet in float64 with each model's own
forces, from the same positions and velocities, for 10,000 steps. A weak harmonic trap, whose exact energy is common to
all, keeps them together. The exact forces of the charges are the control.

Velocity Verlet keeps the energy of a smooth potential but for a fluctuation proportional to dt^2. An operator that is
not smooth (SE(3)-Hyena in radial order, where two points exchange radii) has jumps of energy that forces do not see.

Clouds to learn from are those of the motion itself: equilibrated in the trap at the temperature at which it starts.
Units: masses, charges and Coulomb's constant 1.

    python examples/studies/dynamics.py                    # some minutes for each operator on one core
    python examples/studies/dynamics.py --operators none --dt 0.005
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import matplotlib
import numpy as np
import torch
from data.soft_charges import Clouds, alternating, clouds_at
from data.verlet import Potential, equilibrated, maxwell, trapped, velocity_verlet
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit
from long_range import LongRange, Model, Operator, predict, predictions, shares, spreads, tensors
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEED = 46  # of the data and of the start, which do not depend on the seed of training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamics(LongRange):
    """Settings of this example."""

    STUDY: ClassVar[str] = "dynamics"

    task: tuple[Literal["forces"], ...] = ("forces",)
    """motion needs forces"""
    operators: tuple[Operator, ...] = ("none", "EwaldAttention", "SE3HyenaOperator", "VectorSelfAttention")
    """the global context between the two layers of messages"""
    charges: int = 32
    """in every cloud, an even number"""
    side: float = 7.0
    """of a box of the density of charges; the trap is as weak as leaves them spread as in it"""
    temperature: float = 1.0
    """at the start, in the energy of two unit charges at distance 1"""
    dt: float = 0.01
    """the step of time"""
    steps: int = 10_000
    """of the motion; a tenth of its time again with half of dt"""
    boxes: int = 1
    """motions side by side"""
    samples: int = 200
    """of the energy, for the figure"""
    train: int = 256
    """clouds to train on; a quarter as many each to choose the epoch, and to test and start from"""
    epochs: int = 12
    batch: int = 8
    learning_rate: float = 0.05
    clip: float = 1.0
    warmup: float = 0.0

    def check(self) -> None:
        super().check()
        for name in ("temperature", "dt", "steps", "boxes", "samples"):
            self.positive(name)
        if self.steps % self.samples or self.steps % 10:
            raise ValueError(f"--steps must be a multiple of 10 and of --samples {self.samples}, got {self.steps}")
        if self.boxes > self.train // 4:
            raise ValueError(f"--boxes must be at most a quarter of --train {self.train}, got {self.boxes}")

    @property
    def stiffness(self) -> float:
        """Of the trap: free points of this temperature spread in it as in the box, by side^2 / 12."""
        return 12 * self.temperature / self.side**2


PRESETS = {
    "quick": Dynamics(
        train=8, charges=8, epochs=1, batch=4, steps=20, boxes=2, samples=10,
        operators=("none", "SE3HyenaOperator"),
    ),
    "study": Dynamics(results=study.committed("dynamics")),
}  # fmt: skip


def exact(charges: Tensor, softness: float) -> Potential:
    """The charges' own energies and forces."""

    def potential(positions: Tensor) -> tuple[Tensor, Tensor]:
        there = clouds_at(charges, positions, softness)
        return there.energies, there.forces

    return potential


def learned(model: Model, charges: Tensor, unit: float) -> Potential:
    """A model's energies and their derivatives; it learned them in this unit."""

    def potential(positions: Tensor) -> tuple[Tensor, Tensor]:
        out = predict(model, [charges, positions, positions])[0].detach()  # or every step hangs on the one before
        return unit * math.sqrt(charges.shape[1]) * out[:, 0, 0], unit * out[..., 1:]

    return potential


def clouds(settings: Dynamics) -> list[Clouds]:
    """Equilibrated in the trap: those to train on, to choose the epoch, and to test on and start from."""
    counts = settings.train, settings.train // 4, settings.train // 4
    charges = alternating(sum(counts), settings.charges)
    generator = torch.Generator().manual_seed(SEED)
    positions = torch.randn(sum(counts), settings.charges, 3, dtype=torch.float64, generator=generator)
    positions *= settings.side / math.sqrt(12)
    potential = trapped(exact(charges, settings.softness), settings.stiffness)
    positions = equilibrated(potential, positions, settings.temperature, 0.05, 25, 8, SEED)
    return [
        clouds_at(signs, places, settings.softness)
        for signs, places in zip(charges.split(counts), positions.split(counts), strict=True)
    ]


def measures(energy: Tensor, dt: float) -> dict[str, list[float]]:
    """Of energies (steps + 1, B), one a step: slope of a straight line, scatter about it, largest change in a step."""
    times = dt * torch.arange(len(energy), dtype=energy.dtype)[:, None]
    times = times - times.mean()
    slope = (times * energy).sum(0) / times.square().sum()
    about = energy - energy.mean(0) - slope * times
    return {
        "drift": slope.tolist(),
        "fluctuation": about.square().mean(0).sqrt().tolist(),
        "jump": energy.diff(dim=0).abs().amax(0).tolist(),
    }


def move(potential: Potential, start: Clouds, settings: Dynamics) -> dict[str, Any]:
    """The motion from the first of these clouds, energies a charge; again with half of dt for a tenth of the time."""
    positions = start.positions[: settings.boxes]
    velocities = maxwell(positions, settings.temperature, torch.Generator().manual_seed(SEED + 1))
    potential, begin = trapped(potential, settings.stiffness), time.perf_counter()
    motion = velocity_verlet(potential, positions, velocities, settings.dt, settings.steps)
    seconds = time.perf_counter() - begin
    tenth = settings.steps // 10
    halved = velocity_verlet(potential, positions, velocities, settings.dt / 2, 2 * tenth)
    energy = motion.energy / settings.charges
    kept = energy[:: settings.steps // settings.samples, 0]
    return {
        **measures(energy, settings.dt),
        "fluctuation of a tenth": measures(energy[: tenth + 1], settings.dt)["fluctuation"],
        "with half of dt": measures(halved.energy / settings.charges, settings.dt / 2)["fluctuation"],
        "kinetic": (motion.kinetic.mean(0) / settings.charges).tolist(),
        "energies": [float(f"{x:.5g}") for x in (kept - kept[0]).tolist()],
        "seconds": round(seconds, 1),
    }


def train(settings: Dynamics) -> Outcome:
    """One model, trained and tested, and what moves by its forces."""
    parts = clouds(settings)
    units = spreads(parts[0], "forces")
    data = [tensors(part, units, "forces") for part in parts]
    middle = data[0][2][..., 0].mean()
    for _, _, target in data:
        target[..., 0] -= middle  # energies count from anywhere
    training = tensor_batches(data[0], settings.batch, settings.seed, device=settings.data_device)
    held_out = [tensor_batches(part, 32, device=settings.data_device) for part in data[1:]]
    learner = Regressor(Model(settings), predict, settings)
    outcome = fit(learner, training, *held_out)
    model = learner.model.cpu()
    outcome.metric = "force error"
    outcome.more["energy"], outcome.value = shares(*predictions(model, data[2]))
    model = model.double().requires_grad_(False)
    few = parts[2].charges[: settings.boxes]
    outcome.more["motion"] = move(learned(model, few, units[1]), parts[2], settings)
    outcome.more["exact"] = move(exact(few, settings.softness), parts[2], settings)
    return outcome


def motions(rows: list[Row]) -> Iterator[tuple[str, list[Row], list[dict[str, Any]]]]:
    """By operator its rows and motions; the exact one, without a row, comes first."""
    yield "exact forces", [], [rows[0].more["exact"]]
    for (name,), group in grouped(rows, "operators").items():
        yield name, group, [row.more["motion"] for row in group]


def table(rows: list[Row]) -> str:
    """Means over boxes, and the largest jump in any."""
    lines = []
    for name, group, moved in motions(rows):

        def mean(what: str, moved: list[dict[str, Any]] = moved) -> float:
            return float(np.mean(np.abs([motion[what] for motion in moved])))

        lines.append([
            name,
            mean_and_spread((row.value for row in group), 3) if group else "0",
            f"{mean('drift'):.1e}",
            f"{mean('drift') / mean('kinetic'):.1e}",
            f"{mean('fluctuation'):.1e}",
            f"{mean('fluctuation of a tenth') / mean('with half of dt'):.1f}",
            f"{max(max(motion['jump']) for motion in moved):.1e}",
            f"{2 / 3 * mean('kinetic'):.2f}",
            f"{mean('seconds'):.0f}",
        ])  # fmt: skip
    return markdown(
        ["global context", "force error", "drift", "drift / kinetic energy", "fluctuation",
         "fluctuation / with half of dt", "largest jump in a step", "temperature", "seconds"],
        lines,
    )  # fmt: skip


def draw(rows: list[Row], path: Path) -> None:
    """How far the energy of the first box is from its start, by time."""
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    settings = rows[0].settings
    for number, (name, _, moved) in enumerate(motions(rows)):
        energies = np.abs(moved[0]["energies"])[1:]
        times = np.arange(1, len(energies) + 1) * settings["steps"] * settings["dt"] / settings["samples"]
        axis.plot(times, energies, color="k" if number == 0 else f"C{number}", label=name, linewidth=1)
    axis.set(xlabel="time", ylabel="|energy - energy at the start|, a charge", yscale="log")
    axis.set_ylim(bottom=1e-6)  # below are only moments at which a fluctuation passes zero
    figure.legend(fontsize="small", title="global context", title_fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """The table, and its figure."""
    draw(rows, folder / "energies.png")
    return {"energies": table(rows)}


if __name__ == "__main__":
    study.main(Dynamics(), PRESETS, __doc__, train, report)
