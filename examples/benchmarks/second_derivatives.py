"""Time and peak memory of a double backward (forces trained on, gradient penalties) against backward.

"backward" is the gradient of a loss in inputs and parameters; "double backward" that of a function of those gradients,
whose graph holds a first backward too. Both start from a graph that is there, which is not counted, in a process of
their own, with warm-up; times are medians.

    python examples/benchmarks/second_derivatives.py                   # two minutes on two cores
    python examples/benchmarks/second_derivatives.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import (
    GIB,
    add_arguments,
    in_own_process,
    machine,
    memory_before,
    memory_peak,
    report,
    short,
    table,
    timings,
    warm_up,
)
from torch import Tensor, nn
from tqdm import tqdm

from tg_equiattn.functional import vector_long_conv
from tg_equiattn.grids import PixelGrid
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import (
    GroupAttention,
    PerformerAttention,
    SE3HyenaOperator,
    VectorSelfAttention,
)

GRID = PixelGrid((32, 32), 4)
DIRECTIONS = ("backward", "double backward")


def group(elements: int, relation: str) -> tuple[nn.Module, dict[str, Any]]:
    layer = GroupAttention(cyclic(elements), 16, 16, heads=8, kernel_size=5, relation=relation)
    return layer, {"x": torch.randn(4, 16, elements, 28, 28)}


def performer(position: str | None) -> tuple[nn.Module, dict[str, Any]]:
    layer = PerformerAttention(128, 128, 4, position=position, cutoff=4, method="features")
    return layer, {"x": torch.randn(4, len(GRID), 128), "grid": GRID}


def tokens(make: Callable[..., nn.Module], count: int) -> tuple[nn.Module, dict[str, Any]]:
    return make(16, 16), {"scalars": torch.randn(2, count, 16), "vectors": torch.randn(2, count, 16, 3)}


class LongConv(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return vector_long_conv(q, k)


LAYERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "group attention, C4, ge_vit": lambda: group(4, "ge_vit"),
    "group attention, C8, relative": lambda: group(8, "relative"),
    "Performer attention, window": lambda: performer("window"),
    "Performer attention, clipped": lambda: performer("clipped"),
    "vector self-attention, 512 tokens": lambda: tokens(VectorSelfAttention, 512),
    "SE(3)-Hyena operator, 4,096 tokens": lambda: tokens(SE3HyenaOperator, 4096),
    "vector long convolution, 20,000 tokens": lambda: (
        LongConv(),
        {"q": torch.randn(2, 20_000, 16, 3), "k": torch.randn(2, 20_000, 16, 3)},
    ),
}


def measure_layer(name: str, direction: str, repeats: int, device: str) -> dict:
    torch.manual_seed(0)
    layer, inputs = LAYERS[name]()
    layer = layer.to(device)
    inputs = {n: x.to(device).requires_grad_() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    wanted = [x for x in (*inputs.values(), *layer.parameters()) if isinstance(x, Tensor)]
    out = layer(**inputs)
    loss = sum(x.square().sum() for x in (out if isinstance(out, tuple) else (out,)))
    if direction == "double backward":
        firsts = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        loss = sum(g.square().sum() for g in firsts if g is not None and g.requires_grad)

    def run() -> None:
        torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)

    before = memory_before(device)
    run()
    peak = memory_peak(device) - before
    expected = warm_up(run, 1, device)
    return {"seconds": statistics.median(timings(run, repeats, expected, device)), "bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    add_arguments(parser, "out/benchmarks/second_derivatives.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_layer(*json.loads(options.measure))))
        return
    measured = [f"{direction}, {unit}" for unit in ("s", "GiB") for direction in DIRECTIONS]
    rows = table(["layer", *measured, "times the time", "times the memory"])
    for name in tqdm(options.layers, desc="second derivatives", disable=None):
        first, second = (in_own_process(__file__, name, d, options.repeats, options.device) for d in DIRECTIONS)
        if isinstance(first, str) or isinstance(second, str):
            rows.append(f"| {name} | {first if isinstance(first, str) else second} |" + " - |" * 5)
            continue
        both = first, second
        cells = [short(x["seconds"]) for x in both] + [f"{x['bytes'] / GIB:.3f}" for x in both]
        cells += [f"{second[what] / first[what]:.1f}" for what in ("seconds", "bytes")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        tqdm.write(rows[-1])
    report(f"{machine(options.device)}; a graph that is there already does not count.", rows, options.output)


if __name__ == "__main__":
    main()
