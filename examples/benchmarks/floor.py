"""The floor under a measured time: bytes over bandwidth, operations over rate, whichever is longer.

The rates are measured on the device itself at the start of a run: a large copy (read and written), a large float32
matrix product at the TF32 setting the user has, exponentials of what is in registers (on the CPU: in the cache), and on
CUDA a bfloat16 matrix product for layers in half precision. How much work there is, counts.py counts.

    python examples/benchmarks/floor.py --device cuda    # print the rates
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from counts import Floor
from measure import add_device, in_own_process, index_of, is_cuda, short, timings, warm_up
from torch import Tensor

CHAIN = 64  # exponentials of a number between reading and writing it


class Rates(NamedTuple):
    """A second's bytes, float32 operations, exponentials, and operations in half precision."""

    bandwidth: float
    flops: float
    exponentials: float
    half_flops: float = 0.0


def _best(run: Callable[[], object], work: float, device: str) -> float:
    """Work a second in the fastest of some calls."""

    def call() -> None:
        run()

    return work / min(timings(call, 7, warm_up(call, 3, device), device))


def _exponentials(x: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = torch.exp(-x)
    return x


def _copy_rate(numbers: int, device: str) -> float:
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    return _best(lambda: target.copy_(source), 2 * source.nbytes, device)


def _product_rate(side: int, device: str, dtype: torch.dtype = torch.float32) -> float:
    left, right = torch.randn(2, side, side, device=device, dtype=dtype)
    return _best(lambda: left @ right, 2 * side**3, device)


@torch.no_grad()
def measured_rates(device: str) -> Rates:
    """What torch reaches on a device."""
    cuda = is_cuda(device)
    if cuda:
        torch.cuda.set_device(index_of(device))
    bandwidth = _copy_rate(2**28 if cuda else 2**25, device)  # numbers: far beyond any cache
    flops = _product_rate(8192 if cuda else 2048, device)
    half = _product_rate(8192, device, torch.bfloat16) if cuda else 0.0
    x = torch.rand(2**24 if cuda else 2**15, device=device)
    if cuda and importlib.util.find_spec("triton"):
        chain = torch.compile(_exponentials)  # one kernel: numbers stay in registers
        exponentials = _best(lambda: chain(x), CHAIN * len(x), device)
    else:
        out = torch.empty_like(x)
        exponentials = _best(lambda: torch.exp(x, out=out), len(x), device)
    return Rates(bandwidth, flops, exponentials, half)


def machine_rates(options: argparse.Namespace) -> Rates:
    """The rates asked for by --rates, or measured in a process of its own."""
    if options.rates:
        if len(options.rates) not in (3, 4) or min(options.rates) <= 0:
            raise SystemExit(f"--rates must be three or four positive numbers, got {options.rates}")
        return Rates(*options.rates)
    found = in_own_process(__file__, options.device)
    if isinstance(found, str):
        raise SystemExit(f"the rates of {options.device} cannot be measured: {found}; --rates gives them")
    return Rates(**found)


def floor_seconds(floor: Floor, rates: Rates) -> float:
    """The least time: the three kinds of work at once, each at its own rate."""
    flops = rates.half_flops if floor.half and rates.half_flops else rates.flops
    return max(floor.bytes / rates.bandwidth, floor.flops / flops, floor.exponentials / rates.exponentials)


def floor_cells(value: dict | str, floor: Floor | None, rates: Rates, unit: float = 1.0) -> list[str]:
    """The floor in seconds (or other units of seconds), and how many times it the measurement is."""
    if floor is None:
        return ["-", "-"]
    seconds = floor_seconds(floor, rates)
    return [short(seconds / unit), "-" if isinstance(value, str) else short(value["seconds"] / seconds)]


def floor_note(rates: Rates) -> str:
    """What goes under a table."""
    half = f" ({rates.half_flops / 1e9:,.0f} in half precision)" if rates.half_flops else ""
    return (
        f"floor: the longest of bytes / {rates.bandwidth / 1e9:,.1f} GB/s, operations / {rates.flops / 1e9:,.0f} "
        f"Gflop/s{half} and exponentials / {rates.exponentials / 1e9:,.2f} G/s, the rates of a large copy, a large "
        f"matrix product (float32, precision {torch.get_float32_matmul_precision()!r}) and exp on this device, unless "
        "given by --rates. The counts (counts.py) are a lower bound on what any implementation of the same algorithm "
        "must do; what is small enough to stay in a cache can be read faster than that."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured_rates(*json.loads(options.measure))._asdict()))
        return
    print(floor_note(measured_rates(options.device)))


if __name__ == "__main__":
    main()
