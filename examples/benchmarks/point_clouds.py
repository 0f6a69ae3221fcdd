"""Time and peak memory of Euclidean fast attention: against other operators, on forces, and where pairs are faster.

    python examples/benchmarks/point_clouds.py                        # 20,000 points; batches of small clouds
    python examples/benchmarks/point_clouds.py --nodes 1000000 --layers euclidean --passes forward --sizes
    python examples/benchmarks/point_clouds.py --device cuda

One layer of 32 scalar and 32 vector channels on points in a ball, with the defaults (phases up to pi: 86 directions).
"energies" is a step of training on a sum of the outputs, "forces" one on that sum and its gradient in the positions.
Every number of the first table comes from a process of its own; peak memory is beyond what the process had before.

The second table is for batches of 4,096 points in clouds of one size. The third is time a point of one cloud, against
attention over all pairs: torch's scaled_dot_product_attention with as many channels in scores and values. Its scores
are of scalars and know no positions, so it finds less. The line below says where it becomes the slower one. Layers and
passes of a row of these two tables take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from measure import GIB, add_arguments, in_own_process, in_turn, machine, measure, report, short, step, table
from torch import Tensor, nn
from tqdm import tqdm

from tg_equiattn.nn import EuclideanFastAttention, SE3HyenaOperator, VectorSelfAttention

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CHANNELS, POINTS = 32, 4096


class InvariantAttention(nn.Module):
    """Attention over all pairs with scores from scalars alone, which mixes scalars and vectors: query, key and value as
    :class:`EuclideanFastAttention` has them, but blind to positions.

    Scores have 16 channels, and zeros up to the width of values: so torch streams them on the CPU.
    """

    def __init__(self, scores: int = 16) -> None:
        super().__init__()
        self.query_key = nn.Linear(CHANNELS, 2 * scores)
        self.scalars, self.vectors = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(2))

    def forward(self, scalars: Tensor, vectors: Tensor, pos: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value = torch.cat([self.scalars(scalars), self.vectors(vectors.transpose(2, 3)).flatten(2)], -1)
        query, key = self.query_key(scalars).chunk(2, -1)
        scores = query.shape[-1]
        query, key = (nn.functional.pad(x, (0, value.shape[-1] - scores))[:, None] for x in (query, key))
        out = nn.functional.scaled_dot_product_attention(query, key, value[:, None], scale=scores**-0.5)
        return out[:, 0, :, :CHANNELS], out[:, 0, :, CHANNELS:].unflatten(2, (3, CHANNELS)).transpose(2, 3)


LAYERS = {
    "euclidean": ("Euclidean, directions", lambda: EuclideanFastAttention(*SIZES, max_radius=2.0, method="directions")),
    "pairs": ("Euclidean, pairs", lambda: EuclideanFastAttention(*SIZES, max_radius=2.0, method="pairs")),
    "hyena": ("SE(3)-Hyena", lambda: SE3HyenaOperator(*SIZES)),
    "attention": ("vector self-attention", lambda: VectorSelfAttention(*SIZES)),
    "scores": ("all pairs, invariant scores", InvariantAttention),
}
SIZES = CHANNELS, CHANNELS
PASSES = ("forward", "energies", "forces")


def prepare(name: str, clouds: int, size: int, kind: str, device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A layer, and a call of it on clouds in a ball."""
    torch.manual_seed(0)
    layer: nn.Module = LAYERS[name][1]().to(device)
    direction = nn.functional.normalize(torch.randn(clouds, size, 3, device=device), dim=-1)
    pos = direction * torch.rand(clouds, size, 1, device=device) ** (1 / 3)
    scalars = torch.randn(clouds, size, CHANNELS, device=device)
    vectors = torch.randn(clouds, size, CHANNELS, 3, device=device)

    def energy(pos: Tensor) -> Tensor:
        return sum(x.sum() for x in layer(scalars, vectors, pos=pos))  # type: ignore[return-value]

    def forces() -> Tensor:
        moving = pos.clone().requires_grad_()
        out = energy(moving)
        return out + torch.autograd.grad(out, moving, create_graph=True)[0].square().sum()

    return layer, forces if kind == "forces" else lambda: energy(pos)


def measured(cases: list[tuple[str, str]], clouds: int, size: int, device: str, repeats: int, warmups: int) -> dict:
    """Seconds of several layers and passes in turn, or of one, with its peak bytes."""
    if len(cases) == 1:
        ((name, kind),) = cases
        return measure(lambda: prepare(name, clouds, size, kind, device), kind != "forward", repeats, warmups, device)
    runs = [step(*prepare(name, clouds, size, kind, device), kind != "forward") for name, kind in cases]
    return {"seconds": in_turn(runs, repeats, warmups, device)}


def timed(cases: list[tuple[str, str]], clouds: int, size: int, options: argparse.Namespace) -> dict | str:
    repeats = (options.repeats, 1) if size < 10**5 else (1, 0)
    return in_own_process(os.path.abspath(__file__), cases, clouds, size, options.device, *repeats)


def large_clouds(options: argparse.Namespace) -> list[str]:
    """Rows of one cloud, seconds and GiB by pass."""
    rows = table(["points", "layer", *(f"{kind}, {unit}" for kind in options.passes for unit in ("s", "GiB"))])
    for nodes in options.nodes:
        for name in tqdm(options.layers, desc=f"{nodes:,} points"):
            cells = []
            for kind in options.passes:
                value = timed([(name, kind)], 1, nodes, options)
                failed = isinstance(value, str)
                cells += [value, "-"] if failed else [short(value["seconds"]), f"{value['bytes'] / GIB:.3f}"]
            rows.append(f"| {nodes:,} | {LAYERS[name][0]} | {' | '.join(cells)} |")
    return rows


def small_clouds(options: argparse.Namespace) -> list[str]:
    """Rows of batches of clouds of one size, both methods."""
    cases = [(name, kind) for kind in options.passes for name in ("pairs", "euclidean")]
    methods = {"pairs": "pairs", "euclidean": "directions"}
    rows = table(["points of a cloud", *(f"{kind}, {methods[name]}, s" for name, kind in cases)])
    for size in tqdm(options.sizes, desc="batches"):
        value = timed(cases, max(1, POINTS // size), size, options)
        cells = [value] * len(cases) if isinstance(value, str) else map(short, value["seconds"])
        rows.append(f"| {size} | {' | '.join(cells)} |")
    return rows


def against_all_pairs(options: argparse.Namespace) -> tuple[list[str], dict[tuple[str, str], dict[int, float]]]:
    """Rows of one cloud of each size and where both layers cross; seconds by layer, pass and size."""
    cases = [(name, kind) for kind in ("forward", "energies") for name in ("euclidean", "scores")]
    cases.append(("euclidean", "forces"))
    found: dict[tuple[str, str], dict[int, float]] = {case: {} for case in cases}
    titles = [f"{kind}, {LAYERS[name][0]}" for name, kind in cases]
    rows = ["Microseconds a point:", "", *table(["points", *titles, "forces / energies"])]
    for size in tqdm(sorted(options.compared), desc="against all pairs"):
        value = timed(cases, 1, size, options)
        if isinstance(value, str):
            rows.append(f"| {size:,} | {value} |" + " - |" * len(cases))
            continue
        for case, seconds in zip(cases, value["seconds"], strict=True):
            found[case][size] = seconds
        cells = [short(1e6 * found[case][size] / size) for case in cases]
        share = found["euclidean", "forces"][size] / found["euclidean", "energies"][size]
        rows.append(f"| {size:,} | {' | '.join(cells)} | {share:.2f} |")
    rows.append("")
    for kind in ("forward", "energies"):
        times = {n: found["scores", kind][n] / seconds for n, seconds in found["euclidean", kind].items()}
        rows.append(f"- {kind}: {crossover(times)}")
    return rows, found


def crossover(times: dict[int, float]) -> str:
    """Where the time of all pairs, as a multiple of that of Euclidean fast attention, passes 1: between the sizes
    around it a power of the size."""
    below = [n for n, value in times.items() if value < 1]
    above = [n for n, value in times.items() if value >= 1 and n > max(below, default=0)]
    if not below or not above:
        return f"all pairs are {'faster' if below else 'slower'} at all of these sizes"
    a, b = max(below), min(above)
    size = a * (b / a) ** (math.log(times[a]) / math.log(times[a] / times[b]))
    return f"all pairs are slower from {size:,.0f} points on, {times[max(times)]:.1f} times at {max(times):,}"


def draw(found: dict[tuple[str, str], dict[int, float]], path: Path) -> None:
    """Time a point against the number of points."""
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for (name, kind), seconds in found.items():
        style = {"forward": "o--", "energies": "o-", "forces": "o:"}[kind]
        colour = "C0" if name == "euclidean" else "C1"
        values = [1e6 * x / n for n, x in seconds.items()]
        axis.plot(list(seconds), values, style, color=colour, label=f"{LAYERS[name][0]}, {kind}")
    axis.set(xscale="log", yscale="log", xlabel="points", ylabel="microseconds a point")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="*", type=int, default=[20_000])
    parser.add_argument("--sizes", nargs="*", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--compared", nargs="*", type=int, default=[100, 300, 1000, 3000, 10_000, 30_000],
                        help="sizes of one cloud, against attention over all pairs")  # fmt: skip
    parser.add_argument(
        "--layers", nargs="+", choices=[n for n in LAYERS if n != "scores"], default=["euclidean", "hyena"]
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add_arguments(parser, "out/benchmarks/point_clouds.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(*json.loads(options.measure))))
        return
    rows = large_clouds(options) if options.nodes else []
    rows += ["", *small_clouds(options)] if options.sizes else []
    if options.compared:
        lines, found = against_all_pairs(options)
        rows += ["", *lines]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draw(found, options.output.with_suffix(".png"))
    report(f"{CHANNELS} scalar and {CHANNELS} vector channels; {machine(options.device)}.", rows, options.output)


if __name__ == "__main__":
    main()
