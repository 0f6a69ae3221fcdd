"""Time and peak memory of a group self-attention layer against the materialised formula.

The baseline is the same layer with every score of every (output, query, key) element in memory, as published code
computes it (``tests/oracles.py``). Every measurement runs in a process of its own, one after the other, with warm-up;
times are medians. Where the baseline does not fit in memory at the asked batch it runs, and so does the layer beside
it, at the largest batch that does.

    python examples/benchmarks/group_attention.py                # C4, C8, C12, D4, D8 and global C4, about 15 minutes
    python examples/benchmarks/group_attention.py --cases C4     # one case
    python examples/benchmarks/group_attention.py --device cuda
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from measure import DIRECTIONS, add_arguments, available, cell, in_own_process, machine, measure, report
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
VARIANTS = ("baseline", "eager", "compiled")
NAMES = ("materialised", "eager", "compiled")


def oracles():
    spec = importlib.util.spec_from_file_location("oracles", ROOT / "tests" / "oracles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MaterialisedAttention(GroupAttention):
    """The baseline: the same parameters and projections, every score materialised."""

    attention = staticmethod(oracles().attention_materialised)

    def forward(self, x: Tensor) -> Tensor:
        rho_space, rho_group = self.encoding(self._offsets(tuple(x.shape[3:])))
        out = self.attention(
            *self._project(x), rho_space, rho_group, self._index, self.neighbourhood.kernel_size,
            self.head_channels**-0.5,
        )  # fmt: skip
        return self.out(out.flatten(1, 2))


def measure_case(case: str, variant: str, direction: str, batch: int, size: int, repeats: int, device: str) -> dict:
    """Median seconds and peak bytes above what was there before the first call."""
    torch.manual_seed(0)
    group, kernel_size = CASES[case]
    kind = MaterialisedAttention if variant == "baseline" else GroupAttention
    layer = kind(group, CHANNELS, CHANNELS, heads=HEADS, head_channels=HEAD_CHANNELS, kernel_size=kernel_size)
    layer.to(device)
    x = torch.randn(batch, CHANNELS, len(group), size, size, device=device)
    cuda = device.startswith("cuda")
    torch.compile(lambda x: x + 1)(torch.zeros(2)) if variant == "compiled" else None  # the compiler's own memory
    call = torch.compile(layer, fullgraph=True) if variant == "compiled" else layer
    return measure(
        lambda: (layer, lambda: call(x)),
        direction == "forward+backward",
        repeats,
        2 if variant == "compiled" or cuda else 1,
        cuda,
    )


def fitting_batch(case: str, batch: int, size: int, device: str) -> int:
    """The largest batch (by halving) whose materialised backward pass fits: about six tensors of all scores."""
    group, kernel_size = CASES[case]
    scores = len(group) ** 3 * (kernel_size or size) ** 2 * size**2 * HEADS * 4
    while batch > 1 and 6 * scores * batch > available(device):
        batch //= 2
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--batch", type=int, default=8, help="images (default 8)")
    parser.add_argument("--size", type=int, default=28, help="pixels a side (default 28)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add_arguments(parser, "out/benchmarks/group_attention.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_case(*json.loads(options.measure))))
        return

    columns = ["group", "batch", "pass", *(f"{name}, {unit}" for unit in ("s", "GiB") for name in NAMES)]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    work = [(case, direction) for case in options.cases for direction in DIRECTIONS]
    for case, direction in tqdm(work, desc="group attention"):
        everywhere = CASES[case][1] is None
        batch = options.batch if everywhere else fitting_batch(case, options.batch, options.size, options.device)
        results = {}
        for variant in VARIANTS:
            if variant not in options.variants or (variant == "baseline" and everywhere):
                results[variant] = "-"
                continue
            repeats = min(options.repeats, 3) if variant == "baseline" or everywhere else options.repeats
            results[variant] = in_own_process(
                __file__, case, variant, direction, batch, options.size, repeats, options.device
            )
        base = results["baseline"]
        cells = [cell(results[v], base, what) for what in ("seconds", "bytes") for v in VARIANTS]
        rows.append(f"| {case} | {batch} | {direction} | " + " | ".join(cells) + " |")
        tqdm.write(rows[-1])
    note = (
        f"{CHANNELS} channels, {HEADS} heads of {HEAD_CHANNELS}, {options.size} x {options.size} pixels, windows of "
        f"5 x 5 unless global; {machine(options.device)}. In brackets: how many times faster, or less memory, than "
        "materialised."
    )
    report(note, rows, options.output)


if __name__ == "__main__":
    main()
