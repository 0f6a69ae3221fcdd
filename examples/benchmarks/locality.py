"""What locality costs: time and peak memory of attention layers with it, as multiples of those without.

Both layers of a row take turns in one process of their own, with warm-up; times are medians. Memory is measured in a
process each. The goal is at most 1.1 of both.

    python examples/benchmarks/locality.py                   # ten minutes on two cores
    python examples/benchmarks/locality.py --device cuda
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from measure import (
    DIRECTIONS,
    GIB,
    add_arguments,
    in_own_process,
    in_turn,
    machine,
    measure,
    report,
    short,
    step,
    table,
)
from torch import nn
from tqdm import tqdm

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention, LiftingAttention

LAYERS = {  # kind, rotations, kernel size, pixels a side, further options
    "lifting, C8, 5 x 5": (LiftingAttention, 8, 5, 28, {}),
    "ge_vit, C4, 5 x 5": (GroupAttention, 4, 5, 28, {"relation": "ge_vit"}),
    "ge_vit, C8, 3 x 3": (GroupAttention, 8, 3, 28, {"relation": "ge_vit"}),
    "relative, C8, 5 x 5": (GroupAttention, 8, 5, 28, {"relation": "relative"}),
    "relative, C4, global": (GroupAttention, 4, None, 12, {"relation": "relative"}),
}
CHANNELS, HEADS, HEAD_CHANNELS, BATCH = 16, 8, 8, 4
WAYS = ("eager", "compiled")
WITHOUT, WITH = None, 4.0


def prepare(name: str, way: str, locality: float | None, device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The layer, and a call of it."""
    kind, rotations, kernel_size, size, options = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(
        cyclic(rotations), CHANNELS, CHANNELS, heads=HEADS, head_channels=HEAD_CHANNELS, kernel_size=kernel_size,
        neighbourhood="square", locality=locality, **options,
    ).to(device)  # fmt: skip
    x = torch.randn(BATCH, CHANNELS, *([rotations] if kind is GroupAttention else []), size, size, device=device)
    call = torch.compile(layer) if way == "compiled" else layer
    return layer, lambda: call(x)


def measure_layer(name: str, way: str, direction: str, locality: float | str | None, repeats: int, device: str) -> dict:
    """The memory of one layer, or seconds of both in turn."""
    backward = direction == "forward+backward"
    if locality != "both":
        return measure(lambda: prepare(name, way, locality, device), backward, 1, 2, device)

    runs = [step(*prepare(name, way, which, device), backward) for which in (WITHOUT, WITH)]
    return {"seconds": in_turn(runs, repeats, 2, device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add_arguments(parser, "out/benchmarks/locality.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_layer(*json.loads(options.measure))))
        return
    rows = table(["layer", "", "pass", "without, s", "with, s", "times the time", "without, GiB", "times the memory"])
    work = [(name, way, direction) for name in options.layers for way in options.ways for direction in DIRECTIONS]
    for case in tqdm(work, desc="locality"):
        results = [
            in_own_process(__file__, *case, locality, options.repeats, options.device)
            for locality in ("both", WITHOUT, WITH)
        ]
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            rows.append(f"| {' | '.join(case)} | {failed[0]} |" + " - |" * 4)
            continue
        (without, beside), (lean, rich) = results[0]["seconds"], (result["bytes"] for result in results[1:])
        cells = [short(without), short(beside), f"{beside / without:.2f}", f"{lean / GIB:.3f}", f"{rich / lean:.2f}"]
        rows.append(f"| {' | '.join((*case, *cells))} |")
        tqdm.write(rows[-1])
    note = f"{CHANNELS} channels, {HEADS} heads of {HEAD_CHANNELS}, batch {BATCH}, 28 x 28 pixels (global 12 x 12); "
    report(note + machine(options.device), rows, options.output)


if __name__ == "__main__":
    main()
