"""Time and peak memory of Euclidean fast attention: against other operators, on forces, and where pairs are faster.

    python examples/benchmarks/point_clouds.py                        # 20,000 points; batches of small clouds
    python examples/benchmarks/point_clouds.py --nodes 1000000 --layers euclidean --passes forward --sizes
    python examples/benchmarks/point_clouds.py --device cuda

One layer of 32 scalar and 32 vector channels on points in a ball, with the defaults (phases up to pi: 86 directions).
"energies" is a step of training on a sum of the outputs, "forces" one on that sum and its gradient in the positions.
The second table is for batches of 4,096 points in clouds of one size. Every number comes from a process of its own;
peak memory is beyond what the process had before.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from measure import GIB, add_arguments, in_own_process, machine, measure, report, short, table
from torch import Tensor, nn
from tqdm import tqdm

from tg_equiattn.nn import EuclideanFastAttention, SE3HyenaOperator, VectorSelfAttention

CHANNELS, POINTS = 32, 4096
LAYERS = {
    "euclidean": ("Euclidean, directions", lambda: EuclideanFastAttention(*SIZES, max_radius=2.0, method="directions")),
    "pairs": ("Euclidean, pairs", lambda: EuclideanFastAttention(*SIZES, max_radius=2.0, method="pairs")),
    "hyena": ("SE(3)-Hyena", lambda: SE3HyenaOperator(*SIZES)),
    "attention": ("vector self-attention", lambda: VectorSelfAttention(*SIZES)),
}
SIZES = CHANNELS, CHANNELS
PASSES = ("forward", "energies", "forces")


def measure_layer(name: str, clouds: int, size: int, kind: str, device: str, repeats: int, warmups: int) -> dict:
    """Seconds and peak bytes of one pass."""

    def prepare():
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

    return measure(prepare, kind != "forward", repeats, warmups, device)


def timed(name: str, clouds: int, size: int, kind: str, options: argparse.Namespace) -> dict | str:
    repeats = (options.repeats, 1) if size < 10**5 else (1, 0)
    return in_own_process(os.path.abspath(__file__), name, clouds, size, kind, options.device, *repeats)


def large_clouds(options: argparse.Namespace) -> list[str]:
    """Rows of one cloud, seconds and GiB by pass."""
    rows = table(["points", "layer", *(f"{kind}, {unit}" for kind in options.passes for unit in ("s", "GiB"))])
    for nodes in options.nodes:
        for name in tqdm(options.layers, desc=f"{nodes:,} points"):
            cells = []
            for kind in options.passes:
                value = timed(name, 1, nodes, kind, options)
                failed = isinstance(value, str)
                cells += [value, "-"] if failed else [short(value["seconds"]), f"{value['bytes'] / GIB:.3f}"]
            rows.append(f"| {nodes:,} | {LAYERS[name][0]} | {' | '.join(cells)} |")
    return rows


def small_clouds(options: argparse.Namespace) -> list[str]:
    """Rows of batches of clouds of one size, both methods."""
    rows = table(
        ["points of a cloud", *(f"{kind}, {m}, s" for kind in options.passes for m in ("pairs", "directions"))]
    )
    for size in tqdm(options.sizes, desc="batches"):
        cells = []
        for kind in options.passes:
            for name in ("pairs", "euclidean"):
                value = timed(name, max(1, POINTS // size), size, kind, options)
                cells.append(value if isinstance(value, str) else short(value["seconds"]))
        rows.append(f"| {size} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="*", type=int, default=[20_000])
    parser.add_argument("--sizes", nargs="*", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["euclidean", "hyena"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add_arguments(parser, "out/benchmarks/point_clouds.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_layer(*json.loads(options.measure))))
        return
    rows = large_clouds(options) if options.nodes else []
    rows += ["", *small_clouds(options)] if options.sizes else []
    report(f"{CHANNELS} scalar and {CHANNELS} vector channels; {machine(options.device)}.", rows, options.output)


if __name__ == "__main__":
    main()
