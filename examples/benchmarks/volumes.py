"""Time and peak memory of attention on volumes beside escnn's R3Conv, between as many fields of the cube's 24 turns.

Layers on octaOnR3, 4 fields, 2 heads of 4, windows of 3 x 3 x 3, one volume:

R3Conv, lifting   escnn's, from trivial to regular fields
lifting           R3LiftingAttention, the same
R3Conv            escnn's, between regular fields
relative          R3GroupAttention(relation="relative")
global            R3GlobalAttention, the same window and random features beyond
ge_vit            R3GroupAttention(relation="ge_vit"), 24 times the scores: up to 16 voxels a side, --all for the others

Peak memory is measured in a process for each layer; times in one process for each size and pass, in which layers take
turns after a warm-up, medians; ge_vit once, after a call on a small volume. In brackets: as a multiple of R3Conv's.

    python examples/benchmarks/volumes.py                # some minutes
    python examples/benchmarks/volumes.py --sizes 16 --layers R3Conv relative ge_vit
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
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
from torch import Tensor, nn
from tqdm import tqdm

FIELDS, HEADS, HEAD_CHANNELS, KERNEL_SIZE = 4, 2, 4, 3
SIZES, LARGEST = (16, 32), 16  # voxels a side; the largest of what takes long
LAYERS = ("R3Conv, lifting", "lifting", "R3Conv", "relative", "global", "ge_vit")
LONG = "ge_vit"
LEAST = 2**20  # bytes that are told from noise
LIMIT, LIMITED = 4, 16  # GiB that a training step may take at most, at so many voxels a side


def prepare(name: str, size: int, backward: bool, device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A layer and a call of it."""
    with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
        from escnn import gspaces
        from escnn import nn as enn
        from tg_equiattn.integrations import escnn

        gspace = gspaces.octaOnR3()
    torch.manual_seed(0)
    lifts = name.endswith("lifting")
    volume, hidden = (enn.FieldType(gspace, FIELDS * [r]) for r in (gspace.trivial_repr, gspace.regular_repr))
    in_type = volume if lifts else hidden
    options = {"heads": HEADS, "head_channels": HEAD_CHANNELS, "kernel_size": KERNEL_SIZE}
    if name.startswith("R3Conv"):
        layer = enn.R3Conv(in_type, hidden, KERNEL_SIZE, padding=KERNEL_SIZE // 2)
    elif name in ("lifting", "global"):
        if name == "global":
            options["relation"] = "relative"
        layer = {"lifting": escnn.R3LiftingAttention, "global": escnn.R3GlobalAttention}[name](
            in_type, hidden, **options
        )
    else:
        layer = escnn.R3GroupAttention(in_type, hidden, relation=name, **options)
    layer = layer.to(device).train(backward)  # in eval mode escnn's filters are there already
    x = enn.GeometricTensor(torch.randn(1, in_type.size, size, size, size, device=device), in_type)
    return layer, lambda: layer(x).tensor


def seconds(names: list[str], size: int, direction: str, repeats: int, device: str) -> list[float]:
    """Of several layers, in turn."""
    backward = direction == DIRECTIONS[1]
    for name in names:
        step(*prepare(name, 4, backward, device), backward)()
    warmups = 0 if names == [LONG] else 2
    return in_turn([step(*prepare(name, size, backward, device), backward) for name in names], repeats, warmups, device)


def memory(name: str, size: int, direction: str, device: str) -> dict:
    """Of one layer."""
    backward = direction == DIRECTIONS[1]
    step(*prepare(name, 4, backward, device), backward)()  # what libraries load at the first call
    return measure(lambda: prepare(name, size, backward, device), backward, 1, 0, device)


def beside(value: float | str, base: float | str) -> str:
    """A number, and as a multiple of another."""
    if isinstance(value, str):
        return value
    return short(value) if isinstance(base, str) or value is base else f"{short(value)} ({short(value / base)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="voxels a side")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--all", action="store_true", help=f"{LONG} at every size")
    add_arguments(parser, "out/benchmarks/volumes.md")
    options = parser.parse_args()
    if options.measure:
        what, *arguments = json.loads(options.measure)
        print(json.dumps({"memory": memory, "seconds": seconds}[what](*arguments)))
        return

    device, rows, lines = options.device, table(["voxels", "pass", "layer", "s", "GiB"]), []
    for size, direction in tqdm(list(itertools.product(options.sizes, DIRECTIONS)), desc="attention on volumes"):
        names = [n for n in options.layers if n != LONG or size <= LARGEST or options.all]
        times: dict[str, float | str] = {}
        for turn, repeats in (([n for n in names if n != LONG], options.repeats), ([n for n in names if n == LONG], 1)):
            if turn:
                found = in_own_process(__file__, "seconds", turn, size, direction, repeats, device)
                times |= dict.fromkeys(turn, found) if isinstance(found, str) else dict(zip(turn, found, strict=True))
        peaks: dict[str, float | str] = {}
        for name in names:
            found = in_own_process(__file__, "memory", name, size, direction, device)
            peaks[name] = found if isinstance(found, str) else max(found["bytes"], LEAST) / GIB
            base = "R3Conv, lifting" if name.endswith("lifting") else "R3Conv"
            cells = [beside(values[name], values.get(base, "-")) for values in (times, peaks)]
            rows.append(f"| {size} | {direction} | {name} | {' | '.join(cells)} |")
            tqdm.write(rows[-1])
        most = max((peak for peak in peaks.values() if not isinstance(peak, str)), default=0.0)
        if size == LIMITED and direction == DIRECTIONS[1]:
            said = "reached" if most <= LIMIT else "not reached"
            lines.append(f"- a training step at {size} voxels a side: {most:.2f} GiB at most (wanted {LIMIT}: {said})")
    note = (
        f"octaOnR3, {FIELDS} fields, {HEADS} heads of {HEAD_CHANNELS}, one volume, windows of 3 x 3 x 3; "
        f"{machine(device)}. In brackets: as a multiple of R3Conv's, for lifting of R3Conv's from trivial fields."
    )
    report(note, [*rows, "", *lines], options.output)


if __name__ == "__main__":
    main()
