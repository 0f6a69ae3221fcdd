"""Time and peak memory of the geometric product of multivectors, channel by channel with weights by grade path.

The product at the heart of every Clifford MLP reads two multivectors a channel and token and writes one, so bytes over
bandwidth is its floor (floor.py). Plain torch, and the same compiled; on CUDA the default size is far beyond what a
cache holds. Every measurement runs in a process of its own, with warm-up; times are medians.

    python examples/benchmarks/clifford_product.py                   # a minute on two cores
    python examples/benchmarks/clifford_product.py --device cuda
    python examples/benchmarks/clifford_product.py --channels 16 --tokens 20000 1000000
"""

from __future__ import annotations

import argparse
import json

import torch
from counts import clifford_product
from floor import floor_cells, floor_note, machine_rates
from measure import DIRECTIONS, add_arguments, cell, in_own_process, is_cuda, machine, measure, report, table
from torch import Tensor, nn
from tqdm import tqdm

from tg_equiattn.functional.vector.clifford import COMPONENTS, GRADE_SIZES, PATHS, channelwise_product

VARIANTS = ("eager", "compiled")


class Product(nn.Module):
    """Two factors (8, C, T) and weights (20, C), whose gradients backward computes."""

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.randn(COMPONENTS, channels, tokens)) for _ in "xy")
        self.weight = nn.Parameter(torch.randn(len(PATHS), channels))

    def forward(self) -> Tensor:
        return torch.cat(channelwise_product(self.weight, self.x.split(GRADE_SIZES), self.y.split(GRADE_SIZES)))


def measure_product(variant: str, channels: int, tokens: int, direction: str, repeats: int, device: str) -> dict:
    """Seconds and peak bytes; the factors themselves count."""
    torch.manual_seed(0)
    compiled = variant == "compiled"
    torch.compile(lambda x: x + 1)(torch.zeros(2, device=device)) if compiled else None  # the compiler's own memory

    def prepare():
        with torch.device(device):
            layer = Product(channels, tokens)
        return layer, torch.compile(layer, fullgraph=True) if compiled else layer

    return measure(prepare, direction == "forward+backward", repeats, 2, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--tokens", nargs="+", type=int, help="default 65,536; 1,048,576 on CUDA")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default all")
    add_arguments(parser, "out/benchmarks/clifford_product.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_product(*json.loads(options.measure))))
        return

    variants = list(options.variants or VARIANTS)
    rates = machine_rates(options)
    rows = table(["tokens", "pass", "product", "s", "GiB", "floor, s", "times floor"])
    sizes = options.tokens or [2**20 if is_cuda(options.device) else 2**16]
    work = [(tokens, direction) for tokens in sizes for direction in DIRECTIONS]
    for tokens, direction in tqdm(work, desc="Clifford product", disable=None):
        floor = clifford_product(options.channels, tokens, direction == "forward+backward")
        base: dict | str = "-"
        for variant in variants:
            value = in_own_process(
                __file__, variant, options.channels, tokens, direction, options.repeats, options.device
            )
            base = value if variant == "eager" else base
            cells = [cell(value, base, what) for what in ("seconds", "bytes")] + floor_cells(value, floor, rates)
            rows.append(f"| {tokens:,} | {direction} | {variant} | {' | '.join(cells)} |")
            tqdm.write(rows[-1])
    note = (
        f"{options.channels} channels; {machine(options.device)}. In brackets: how many times faster, or less memory, "
        f"than eager; {floor_note(rates)}"
    )
    report(note, rows, options.output)


if __name__ == "__main__":
    main()
