"""Time and peak memory of a group self-attention layer against the materialised formula.

The baseline is the same layer with every score of every (output, query, key) element in memory, as published code
computes it (``tests/helpers/oracles.py``). Every measurement runs in a process of its own, one after the other, with
warm-up; times are medians. Where the baseline does not fit in memory at the asked batch it runs, and so do the layers
beside it, at the largest batch that does. Beside each stands its floor (floor.py). Relations of the papers alone: for
frames, and "relative", beside escnn's convolution see frames.py.

    python examples/benchmarks/group_attention.py                # every case, about 20 minutes
    python examples/benchmarks/group_attention.py --cases C4     # one case
    python examples/benchmarks/group_attention.py --device cuda  # C8 at batch 64
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from counts import group_attention
from floor import floor_cells, floor_note, machine_rates
from measure import (
    DIRECTIONS,
    add_arguments,
    available,
    cell,
    in_own_process,
    is_cuda,
    machine,
    measure,
    report,
    table,
)
from torch import Tensor
from tqdm import tqdm

from tg_equiattn.groups import cyclic, dihedral
from tg_equiattn.nn import GroupAttention

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "C4": (cyclic(4), 5), "C8": (cyclic(8), 5), "C12": (cyclic(12), 5), "D4": (dihedral(4), 5), "D8": (dihedral(8), 5),
    "C4 global": (cyclic(4), None),
}  # fmt: skip
CHANNELS, HEADS, HEAD_CHANNELS = 20, 9, 10
NAMES = {"baseline": "materialised", "eager": "eager", "compiled": "compiled"}
VARIANTS = tuple(NAMES)
GOAL_CASE, FASTER, LEANER = "C8", 10, 20  # of the materialised formula, on a GPU at 5 x 5, 28 x 28 pixels
GOAL_BATCH, BATCH = 64, 8


def oracles():
    spec = importlib.util.spec_from_file_location("oracles", ROOT / "tests" / "helpers" / "oracles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MaterialisedAttention(GroupAttention):
    """The baseline: the same parameters and projections, every score materialised."""

    attention = staticmethod(oracles().attention_materialised)

    def forward(self, x: Tensor) -> Tensor:
        offset_encoding, element_encoding = self.encoding(
            self.offsets(tuple(x.shape[3:]), x.device) / self.window.scale()
        )
        out = self.attention(
            *self.project(x), offset_encoding, element_encoding, self.index(x.device), self.window.kernel_size,
            self.head_channels**-0.5,
        )  # fmt: skip
        return self.out(out.flatten(1, 2))


def measure_case(
    case: str, variant: str, direction: str, batch: int, size: int, repeats: int, device: str
) -> dict:  # fmt: skip
    """Median seconds and peak bytes above what was there before the first call."""
    torch.manual_seed(0)
    group, kernel_size = CASES[case]
    x = torch.randn(batch, CHANNELS, len(group), size, size, device=device)
    kind = MaterialisedAttention if variant == "baseline" else GroupAttention
    locality = None if variant == "baseline" else "auto"
    layer = kind(group, CHANNELS, CHANNELS, heads=HEADS, head_channels=HEAD_CHANNELS, kernel_size=kernel_size,
                 relation="ge_vit", locality=locality, window_shape="square").to(device)  # fmt: skip
    compiled = variant == "compiled"
    torch.compile(lambda x: x + 1)(torch.zeros(2, device=device)) if compiled else None  # the compiler's own memory
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    backward = direction == "forward+backward"
    return measure(lambda: (layer, lambda: call(x)), backward, repeats, 2 if compiled else 1, device)


def fitting_batch(case: str, batch: int, size: int, device: str) -> int:
    """The largest batch (by halving) whose materialised backward pass fits: about six tensors of all scores."""
    group, kernel_size = CASES[case]
    scores = len(group) ** 3 * (kernel_size or size) ** 2 * size**2 * HEADS * 4
    while batch > 1 and 6 * scores * batch > available(device):
        batch //= 2
    return batch


def verdict(case: str, batch: int, size: int, direction: str, results: dict[str, dict | str]) -> list[str]:
    """Whether each variant is as much faster and leaner than the materialised formula as it should be on a GPU."""
    base, lines = results["baseline"], []
    for variant in VARIANTS[1:]:
        value = results[variant]
        if isinstance(value, str) or isinstance(base, str):
            continue
        faster = base["seconds"] / value["seconds"]
        leaner = base["bytes"] / max(value["bytes"], 1)
        said = [
            f"{times:.1f} times {what} (wanted {wanted}: {'reached' if times >= wanted else 'not reached'})"
            for times, what, wanted in ((faster, "faster", FASTER), (leaner, "leaner", LEANER))
        ]
        lines.append(f"- {case}, {size} x {size} pixels, batch {batch}, {direction}, {NAMES[variant]} against "
                     f"materialised: {' and '.join(said)}")  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--batch", type=int, help=f"images (default {BATCH}; {GOAL_BATCH} for {GOAL_CASE} on CUDA)")
    parser.add_argument("--size", type=int, default=28, help="pixels a side (default 28)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default all")
    add_arguments(parser, "out/benchmarks/group_attention.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_case(*json.loads(options.measure))))
        return

    device = options.device
    variants, rates = list(options.variants or VARIANTS), machine_rates(options)
    columns = ["group", "batch", "pass", "layer", "s", "GiB", "floor, s", "times floor"]
    rows, lines = table(columns), []
    work = [(case, direction) for case in options.cases for direction in DIRECTIONS]
    for case, direction in tqdm(work, desc="group attention", disable=None):
        group, kernel_size = CASES[case]
        asked = options.batch or (GOAL_BATCH if case == GOAL_CASE and is_cuda(device) else BATCH)
        materialised = kernel_size is not None  # all pairs of all pixels fit nowhere
        batch = fitting_batch(case, asked, options.size, device) if materialised else asked
        floor = group_attention(
            len(group), kernel_size, options.size, batch, CHANNELS, CHANNELS, HEADS, HEAD_CHANNELS,
            direction == "forward+backward",
        )  # fmt: skip
        results: dict[str, dict | str] = {}
        for variant in VARIANTS:
            if variant not in variants or (variant == "baseline" and not materialised):
                results[variant] = "-"
                continue
            repeats = min(options.repeats, 3) if variant == "baseline" or kernel_size is None else options.repeats
            value = results[variant] = in_own_process(
                __file__, case, variant, direction, batch, options.size, repeats, device
            )
            cells = [cell(value, results["baseline"], what) for what in ("seconds", "bytes")]
            cells += floor_cells(value, floor, rates)
            rows.append(f"| {case} | {batch} | {direction} | {NAMES[variant]} | {' | '.join(cells)} |")
            tqdm.write(rows[-1])
        if case == GOAL_CASE and is_cuda(device):
            lines += verdict(case, batch, options.size, direction, results)
    note = (
        f"{CHANNELS} channels, {HEADS} heads of {HEAD_CHANNELS}, {options.size} x {options.size} pixels, windows of "
        f"5 x 5 unless global; {machine(device)}. In brackets: how many times faster, or less memory, than "
        f"materialised. Every row's floor is that of the factorised form; {floor_note(rates)}"
    )
    report(note, [*rows, "", *lines], options.output)


if __name__ == "__main__":
    main()
