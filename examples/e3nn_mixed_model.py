"""Mix SE(3)-Hyena into an e3nn model: global context between message passing layers of short range.

The charged particles of nbody.py, more of them, so that a radius graph leaves most pairs out. The model embeds charges
and velocities by an e3nn Linear, passes messages on the radius graph (spherical harmonics, tensor products with weights
from distances, Gate), and between two such layers places an operator with global context: SE(3)-Hyena, vector
self-attention, the tensor-product Hyena with features up to l = 2, or none. Trains each, checks equivariance with
e3nn's own checker, saves, loads, and prints a table.

    python examples/e3nn_mixed_model.py                    # some minutes on two cores
    python examples/e3nn_mixed_model.py --particles 40 --train 2000 --epochs 60 --device cuda
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import lightning
import matplotlib
import torch
from charged_particles import cached, linear_error
from devices import add_device
from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate
from e3nn.util.test import equivariance_error
from tg_equiattn.integrations.e3nn import SE3HyenaOperator, TensorProductHyenaOperator, VectorSelfAttention
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training import Regressor, batches, fit_best, parameters

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEED, STEPS = 44, 1000
HIDDEN = o3.Irreps("16x0e + 8x1o")
OPERATORS = {
    "none": None,
    "SE3HyenaOperator": lambda: SE3HyenaOperator(HIDDEN, HIDDEN, order="radial"),
    "VectorSelfAttention": lambda: VectorSelfAttention(HIDDEN, HIDDEN),
    "TensorProductHyenaOperator": lambda: TensorProductHyenaOperator(
        HIDDEN, HIDDEN, "8x0e + 4x1o + 2x2e + 8x0e + 4x1o", order="radial"
    ),
}


class MessagePassing(nn.Module):
    """Tensor products with spherical harmonics of the edge, weights from its length, a mean, and a Gate."""

    def __init__(self, irreps_in: o3.Irreps, radius: float) -> None:
        super().__init__()
        self.radius, self.harmonics = radius, o3.Irreps("0e + 1o + 2e")
        scalars, gated = o3.Irreps("16x0e"), o3.Irreps("8x1o")
        self.gate = Gate(scalars, [torch.nn.functional.silu], "8x0e", [torch.sigmoid], gated)
        self.self_connection = o3.Linear(irreps_in, self.gate.irreps_in)
        self.product = o3.FullyConnectedTensorProduct(
            irreps_in, self.harmonics, self.gate.irreps_in, shared_weights=False
        )
        self.weights = FullyConnectedNet([8, 32, self.product.weight_numel], torch.nn.functional.silu)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        edge = pos[source] - pos[target]
        bumps = torch.linspace(0, self.radius, 8, dtype=x.dtype, device=x.device)
        radial = (-((edge.norm(dim=1)[:, None] - bumps) * 4 / self.radius).square()).exp()
        harmonics = o3.spherical_harmonics(self.harmonics, edge, normalize=True, normalization="component")
        messages = self.product(x[source], harmonics, self.weights(radial))
        degree = torch.zeros_like(x[:, 0]).index_add_(0, target, torch.ones_like(x[source, 0])).clamp(min=1)
        mean = torch.zeros_like(messages[:1]).expand(len(x), -1).index_add(0, target, messages) / degree[:, None]
        return self.gate(self.self_connection(x) + mean)


class MixedModel(nn.Module):
    """Linear, message passing, an operator with global context and a residual, message passing, Linear."""

    irreps_in, irreps_out = o3.Irreps("1x0e + 1x1o"), o3.Irreps("1x1o")

    def __init__(self, operator: nn.Module | None, radius: float) -> None:
        super().__init__()
        self.embed = o3.Linear(self.irreps_in, HIDDEN)
        self.first, self.second = MessagePassing(HIDDEN, radius), MessagePassing(HIDDEN, radius)
        self.operator = operator
        self.out = o3.Linear(HIDDEN, self.irreps_out)
        self.radius = radius

    def forward(self, x: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        near = (torch.cdist(pos, pos) < self.radius) & (batch[:, None] == batch)
        edge_index = near.fill_diagonal_(False).nonzero().T
        x = self.first(self.embed(x), pos, edge_index)
        if self.operator is not None:
            x = x + self.operator(x, pos, batch)
        return self.out(self.second(x, pos, edge_index))


def predict(model: MixedModel, data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted and true later positions, (systems, particles, 3)."""
    charges, velocities, positions, later = data
    batch = torch.arange(len(charges), device=charges.device).repeat_interleave(charges.shape[1])
    x = torch.cat([charges[..., None], velocities], -1).flatten(0, 1)
    moved = model(x, positions.flatten(0, 1), batch)
    return positions + moved.view_as(positions), later


def checked(model: MixedModel, data: list[Tensor]) -> float:
    """Largest equivariance error in double precision over rotations, reflections and translations, by e3nn."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = model.double()
        charges, velocities, positions, _ = (x.double() for x in data)
        x = torch.cat([charges[..., None], velocities], -1)[0]
        batch = torch.zeros(len(x), dtype=torch.int64)
        errors = equivariance_error(
            lambda x, pos: model(x, pos, batch), args_in=[x, positions[0]],
            irreps_in=[model.irreps_in, "cartesian_points"], irreps_out=[model.irreps_out],
        )  # fmt: skip
        return max(float(error.max()) for error in errors.values())
    finally:
        model.float()
        torch.set_default_dtype(default)


def draw(errors: dict[str, float], linear: float, path: Path) -> None:
    """Test errors as bars."""
    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    axis.barh(list(errors), list(errors.values()))
    axis.axvline(linear, color="k", linestyle=":", label="linear motion")
    axis.invert_yaxis()
    axis.set(xlabel="mean squared error on test systems", ylabel="global context")
    axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--radius", type=float, default=1.0, help="of the graph; particles start N(0, 1) (n / 5)^(1/3)")
    parser.add_argument("--train", type=int, default=400, help="systems; a quarter as many each to validate and test")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--cache", type=Path, default=Path("out/nbody"))
    parser.add_argument("--output", type=Path, default=Path("out/e3nn_mixed_model"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    counts = options.train, options.train // 4, options.train // 4
    data = cached(sum(counts), SEED, options.particles, STEPS, options.cache)
    tensors = data.charges, data.velocities[:, 0], data.positions[:, 0], data.positions[:, -1]
    parts = [TensorDataset(*part) for part in zip(*(x.float().split(counts) for x in tensors), strict=True)]
    _, velocities, positions, later = parts[2].tensors
    linear, _ = linear_error(positions, velocities, later, 1.0)
    rows = ["| global context | MSE | of linear motion's | parameters | equivariance error |", "|---|---|---|---|---|"]
    errors = {}
    for name in options.operators:
        lightning.seed_everything(options.seed, verbose=False)
        make = OPERATORS[name]
        model = MixedModel(make and make(), options.radius)
        print(f"\n{name}: {parameters(model):,} parameters")
        loaders = [batches(part, options.batch, options.device, shuffle=n == 0) for n, part in enumerate(parts)]
        learner = Regressor(model, predict, options.learning_rate)
        errors[name] = fit_best(learner, *loaders, options.epochs, options.device)
        model.cpu()  # where e3nn's checker makes its rotations
        path = options.output / f"{name}.pt"
        torch.save(model.state_dict(), path)
        loaded = MixedModel(make and make(), options.radius)
        loaded.load_state_dict(torch.load(path, weights_only=True))
        few = [x[:3] for x in parts[2].tensors]
        with torch.no_grad():
            if not torch.equal(predict(loaded.eval(), few)[0], predict(model.eval(), few)[0]):
                raise SystemExit("a loaded model must give what the saved one gave")
            worst = checked(model, few)
        ratio = errors[name] / linear
        rows.append(f"| {name} | {errors[name]:.4f} | {ratio:.3f} | {parameters(model):,} | {worst:.0e} |")
    rows.insert(2, f"| linear motion | {linear:.4f} | 1.000 | 0 | - |")
    report = "\n".join(rows)
    (options.output / "table.md").write_text(report + "\n")
    draw(errors, linear, options.output / "errors.png")
    print(f"\n{report}\n\n{time.perf_counter() - start:.0f} s; written to {options.output}")


if __name__ == "__main__":
    main()
