"""Time and peak memory of group attention over all pixels: by random features beyond a window, beside the window alone
and beside every pair of pixels.

Layers on C4, 64 fields, 8 heads of 8, windows of 5 x 5, relation "relative":

window        GroupAttention
global        GlobalGroupAttention, the same window and random features beyond
all pairs     GroupAttention with kernel_size=None, up to 64 x 64 pixels

Peak memory, forward and backward, is measured in a process for each layer; times of the first two in one process, in
which they take turns after a warm-up, medians; all pairs once, after a call on a small image. In brackets: as a
multiple of the window's.

    python examples/benchmarks/global_attention.py                # some minutes
    python examples/benchmarks/global_attention.py --sizes 64
    python examples/benchmarks/global_attention.py --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import json

import torch
from measure import (
    DIRECTIONS,
    GIB,
    add_arguments,
    in_own_process,
    in_turn,
    is_cuda,
    machine,
    measure,
    report,
    short,
    step,
    table,
)
from tqdm import tqdm

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GlobalGroupAttention, GroupAttention

GROUP, CHANNELS, HEADS, HEAD_CHANNELS = cyclic(4), 64, 8, 8
SIZES, ALL_PAIRS = (32, 64, 128, 224), 64  # pixels a side
VARIANTS = ("window", "global", "all pairs")


def prepare(variant: str, size: int, device: str):
    """A layer and a call of it."""
    torch.manual_seed(0)
    options = {"heads": HEADS, "head_channels": HEAD_CHANNELS}
    if variant == "global":
        layer = GlobalGroupAttention(GROUP, CHANNELS, CHANNELS, relation="relative", **options)
    else:
        options |= {"relation": "relative", "kernel_size": 5 if variant == "window" else None}
        layer = GroupAttention(GROUP, CHANNELS, CHANNELS, **options)
    layer = layer.to(device)
    x = torch.randn(1, CHANNELS, len(GROUP), size, size, device=device)
    return layer, lambda: layer(x)


def seconds(variants: list[str], size: int, direction: str, repeats: int, device: str) -> list[float]:
    """Of several layers, in turn."""
    backward = direction == DIRECTIONS[1]
    for variant in variants:
        step(*prepare(variant, 8, device), backward)()
    warmups = 0 if "all pairs" in variants and not is_cuda(device) else 2
    return in_turn([step(*prepare(v, size, device), backward) for v in variants], repeats, warmups, device)


def memory(variant: str, size: int, device: str) -> dict:
    """Of one layer, forward and backward."""
    prepare(variant, 8, device)[1]().sum().backward()  # what libraries load at the first call
    return measure(lambda: prepare(variant, size, device), True, 1, 0, device)


def beside(value: float | str, base: float | str) -> str:
    """A number, and as a multiple of another."""
    if isinstance(value, str):
        return value
    return short(value) if isinstance(base, str) or value is base else f"{short(value)} ({value / base:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="pixels a side")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add_arguments(parser, "out/benchmarks/global_attention.md")
    options = parser.parse_args()
    if options.measure:
        what, *arguments = json.loads(options.measure)
        print(json.dumps({"memory": memory, "seconds": seconds}[what](*arguments)))
        return

    device, rows = options.device, table(["pixels", "pass", "layer", "s", "GiB"])
    for size, direction in tqdm(list(itertools.product(options.sizes, DIRECTIONS)), disable=None):
        variants = [v for v in options.variants if v != "all pairs" or size <= ALL_PAIRS]
        together = [v for v in variants if v != "all pairs"]
        times: dict[str, float | str] = {}
        for names, repeats in ((together, options.repeats), ([v for v in variants if v not in together], 1)):
            if names:
                found = in_own_process(__file__, "seconds", names, size, direction, repeats, device)
                times |= dict.fromkeys(names, found) if isinstance(found, str) else dict(zip(names, found, strict=True))
        for variant in variants:
            peak = "-"
            if direction == DIRECTIONS[1]:
                found = in_own_process(__file__, "memory", variant, size, device)
                peak = found if isinstance(found, str) else f"{found['bytes'] / GIB:.2f}"
            shown = beside(times[variant], times.get("window", "-"))
            rows.append(f"| {size} x {size} | {direction} | {variant} | {shown} | {peak} |")
            tqdm.write(rows[-1])
    note = (
        f"C4, {CHANNELS} fields, {HEADS} heads of {HEAD_CHANNELS}, one image, 5 x 5 windows; {machine(device)}. In "
        "brackets: as a multiple of the window's time."
    )
    report(note, rows, options.output)


if __name__ == "__main__":
    main()
