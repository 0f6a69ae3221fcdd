"""Predict where charged particles go, with SE(3)-Hyena and what the paper compares it with.

Five charged particles attract and repel each other (charged_particles.py simulates them once and keeps the result).
From positions, velocities and charges at one time the models predict positions 1,000 steps later: SE(3)-Hyena, with and
without local context, SE(3)-Transformer, and the non-equivariant Hyena and Transformer, all on identical data, beside
linear motion x + t v. Prints the paper's Table 1 with ratios to linear motion, and draws it, with how errors fell.

The particles have no order, and a convolution needs one: with --augment, training shuffles them.

    python examples/nbody.py                        # minutes on two cores
    python examples/nbody.py --train 3000 --epochs 150 --models "SE(3)-Hyena + local"
    python examples/nbody.py --full --device cuda   # the paper's split, schedule and widths
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import lightning
import matplotlib
import numpy as np
import torch
from charged_particles import STEPS, cached, linear_error
from devices import add_device
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training import Regressor, batches, fit_best, match_parameters, mean_and_spread, parameters

from tg_equiattn.nn import Hyena, SE3Hyena, SE3Transformer, Transformer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EQUIVARIANT = {
    "SE(3)-Hyena": (SE3Hyena, {}),
    "SE(3)-Hyena + local": (SE3Hyena, {"local_context": True, "edge_channels": 1}),
    "SE(3)-Transformer": (SE3Transformer, {}),
    "SE(3)-Transformer + local": (SE3Transformer, {"local_context": True, "edge_channels": 1}),
}
PLAIN = {"Hyena": Hyena, "Transformer": Transformer}
SEED = 43  # of the simulation, as the data do not depend on the seed of training


def systems(options: argparse.Namespace) -> list[TensorDataset]:
    """Training, validation and test systems: charges, velocities, positions, later positions."""
    counts = options.train, options.validation, options.test
    steps = STEPS if options.task == "standard" else 1000
    data = cached(sum(counts), SEED, options.particles, steps, options.cache)
    first, last = (
        (31, 41) if options.task == "standard" else (0, 10)
    )  # frame f of the standard task is step 100 (f + 1)
    tensors = data.charges, data.velocities[:, first], data.positions[:, first], data.positions[:, last]
    parts = zip(*(x.float().split(counts) for x in tensors), strict=True)
    return [TensorDataset(*part) for part in parts]


def complete_graphs(count: int, particles: int, device: torch.device) -> Tensor:
    """Edges between all pairs of particles of each of ``count`` systems, (2, E)."""
    pairs = (~torch.eye(particles, dtype=torch.bool, device=device)).nonzero().T
    return (pairs[:, None] + particles * torch.arange(count, device=device)[:, None]).flatten(1)


def shuffled(batch: list[Tensor]) -> list[Tensor]:
    """The particles of every system in a random order."""
    order = torch.rand_like(batch[0]).argsort(1)
    return [x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x)) for x in batch]


def predict(model: nn.Module, batch: list[Tensor], augment: bool = False) -> tuple[Tensor, Tensor]:
    """Predicted and true later positions."""
    if augment and model.training:
        batch = shuffled(batch)
    charges, velocities, positions, later = batch
    scalars = torch.stack([charges > 0, charges < 0], -1).to(charges.dtype)
    edges = {}
    if getattr(model, "local_context", False):
        index = complete_graphs(len(charges), charges.shape[1], charges.device)
        flat = charges.flatten()
        edges = {"edge_index": index, "edge_attr": (flat[index[0]] * flat[index[1]])[:, None]}
    _, moved = model(scalars, velocities[:, :, None], pos=positions, **edges)
    return positions + moved[:, :, 0], later


def build(name: str, options: argparse.Namespace) -> nn.Module:
    """A model with two scalars (the charge, one-hot) and one vector (the velocity) in, and one vector out."""
    if name in EQUIVARIANT:
        model, extra = EQUIVARIANT[name]
        return model(
            2, 1, 0, 1, hidden_scalars=options.scalars, hidden_vectors=options.vectors, depth=options.depth,
            num_blocks=options.blocks, **extra,
        )  # fmt: skip
    wanted = parameters(build("SE(3)-Hyena", options))
    return match_parameters(lambda channels: PLAIN[name](2, 1, 0, 1, channels=channels, depth=options.depth), wanted)


class Curve(lightning.Callback):
    """Validation errors by epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.errors: list[float] = []

    def on_validation_end(self, trainer: lightning.Trainer, module: Regressor) -> None:
        if trainer.state.fn == "fit":
            self.epochs.append(trainer.current_epoch + 1)
            self.errors.append(float(trainer.callback_metrics[module.metric]))


def table(errors: dict[str, list[float]], counts: dict[str, int], linear: float) -> str:
    """The paper's Table 1, and ratios to linear motion."""
    rows = ["| method | MSE | of linear motion's | parameters |", "|---|---|---|---|"]
    for name, values in errors.items():
        ratio = np.mean(values) / linear
        rows.append(f"| {name} | {mean_and_spread(values, digits=4)} | {ratio:.3f} | {counts.get(name, 0):,} |")
    return "\n".join(rows)


def draw(errors: dict[str, list[float]], curves: dict[str, Curve], linear: float, path: Path) -> None:
    """Test errors as bars, and validation errors by epoch."""
    figure, (bars, lines) = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    names = list(errors)
    bars.barh(names, [np.mean(errors[n]) for n in names], color=[f"C{i}" for i in range(len(names))])
    bars.invert_yaxis()
    bars.set(xlabel="mean squared error on test systems")
    for name, curve in curves.items():
        lines.plot(curve.epochs, curve.errors, color=f"C{names.index(name)}", label=name)
    lines.axhline(linear, color="k", linestyle=":", label="linear motion")
    lines.set(xlabel="epoch", ylabel="mean squared error on validation systems", yscale="log")
    lines.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse() -> argparse.Namespace:
    names = [*EQUIVARIANT, *PLAIN]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=names, default=[n for n in names if n != "SE(3)-Transformer + local"]
    )
    parser.add_argument(
        "--task", choices=["standard", "initial"], help="from frame 30 to 40 (default), or from the start to step 1,000"
    )
    parser.add_argument("--train", type=int, help="systems; default 1000")
    parser.add_argument("--validation", type=int, help="systems; default 500, or 2000 with --full")
    parser.add_argument("--test", type=int, help="systems; default 500, or 2000 with --full")
    parser.add_argument("--particles", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="default 40, or 300 with --full")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, help="default 0.003, or 0.0001 with --full")
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument("--scalars", type=int, default=8, help="invariant width")
    parser.add_argument("--vectors", type=int, default=16, help="equivariant width")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=1, help="of every Clifford MLP")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--augment", action="store_true", help="shuffle particles in training")
    parser.add_argument("--full", action="store_true", help="the paper's split, task and schedule")
    add_device(parser)
    parser.add_argument("--cache", type=Path, default=Path("out/nbody"))
    parser.add_argument("--output", type=Path, default=Path("out/nbody"))
    options = parser.parse_args()
    small = {"task": "standard", "train": 1000, "validation": 500, "test": 500, "epochs": 40, "learning_rate": 0.003}
    full = {"task": "initial", "train": 1000, "validation": 2000, "test": 2000, "epochs": 300, "learning_rate": 0.0001}
    for name, value in (full if options.full else small).items():
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    return options


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    train, validation, test = systems(options)
    _, velocities, positions, later = test.tensors
    linear, _ = linear_error(positions, velocities, later, 1.0)
    _, best_time = linear_error(*(train.tensors[n] for n in (2, 1, 3)))
    best_linear, _ = linear_error(positions, velocities, later, best_time)
    errors = {"linear, t = 1": [linear], f"linear, t = {best_time:.2f}": [best_linear]}
    counts: dict[str, int] = {}
    curves: dict[str, Curve] = {}
    for name in options.models:
        for seed in options.seeds:
            lightning.seed_everything(seed, verbose=False)
            model = build(name, options)
            counts[name] = parameters(model)
            print(f"\n{name}, seed {seed}: {counts[name]:,} parameters")
            learner = Regressor(
                model, functools.partial(predict, augment=options.augment), options.learning_rate, options.weight_decay
            )
            curve = curves[name] = Curve()
            loaders = [
                batches(part, options.batch if n == 0 else 500, options.device, shuffle=n == 0)
                for n, part in enumerate((train, validation, test))
            ]
            error = fit_best(learner, *loaders, options.epochs, options.device, callbacks=[curve])
            errors.setdefault(name, []).append(error)
            print(f"{name}, seed {seed}: test error {error:.4f}")
    report = table(errors, counts, linear)
    (options.output / "table.md").write_text(report + "\n")
    draw(errors, curves, linear, options.output / "errors.png")
    print(f"\n{report}\n\n{time.perf_counter() - start:.0f} s; written to {options.output}")


if __name__ == "__main__":
    main()
