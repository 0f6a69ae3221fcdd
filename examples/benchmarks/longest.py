"""The longest context that fits in memory: part of long_context.py, and each search a process of its own.

Doubling from a start until a pass no longer fits, then bisection to 5 %, among lengths whose FFT is fast (prime factors
up to 7), as a user would choose them: others are transformed at twice their length. On CUDA a pass fits where the
allocator finds the memory, all of the card's or --memory-limit of it; on the CPU where the system gives the process
no more than --memory-limit (by default most of what is free) beyond what it had.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
from collections.abc import Callable

import torch
from measure import GIB, available, in_own_process, is_cuda, memory_before, memory_peak, once, resident, short, table

PRECISION = 1.05
FREE = 0.8  # of what the CPU has free: beyond, the system may kill something


def fast_lengths(start: int, end: int) -> list[int]:
    """Even lengths from start to end without prime factors above 7, sorted."""
    found = {2}
    for prime in (2, 3, 5, 7):
        found |= {n * prime**e for n in found for e in range(1, 1 + int(math.log(max(end // n, 1), prime) + 1e-9))}
    return sorted(n for n in found if start <= n <= end)


def search(fits: Callable[[int], dict | None], start: int) -> dict | None:
    """What ``fits`` says of the most tokens that fit, to 5 %; None where not even two do."""
    low, best = 0, None
    high = start
    while (value := fits(high)) is not None:
        low, best, high = high, value, 2 * high
    while best is None and high > 2:
        half = max(2, high // 2)
        best = fits(half)
        low, high = (half, high) if best is not None else (0, half)
    while best is not None and high > PRECISION * low:
        between = fast_lengths(low + 1, high - 1)
        if not between:
            break
        middle = min(between, key=lambda n: abs(math.log(n) - math.log(low * high) / 2))
        value = fits(middle)
        low, best, high = (low, best, middle) if value is None else (middle, value, high)
    return best


def limit_memory(limit: float | None, device: str) -> float:
    """Hold this process to ``limit`` GiB more than it has; returns bytes."""
    if is_cuda(device):
        free, total = torch.cuda.mem_get_info(device)
        size = free if limit is None else limit * GIB
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))  # of the device that is set
        return size
    size = FREE * available(device) if limit is None else limit * GIB
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(resident("VmData") + size), hard))
    return size


def longest_context(name: str, direction: str, device: str, limit: float | None, start: int) -> dict:
    """Tokens, seconds and peak bytes of the longest pass of one layer, and the limit."""
    from long_context import SCALARS, VECTORS, build  # which imports this file

    torch.manual_seed(0)
    layer = build(name).to(device)
    before = 0

    def once_with(tokens: int) -> dict:
        memory_before(device)  # the peak starts anew; what is freed may stay resident, so "before" is that of the first

        def run() -> None:
            scalars = torch.randn(1, tokens, SCALARS, device=device)
            vectors = torch.randn(1, tokens, VECTORS, 3, device=device)
            with torch.set_grad_enabled(direction != "forward"):
                out = layer(scalars, vectors)[1]
                if direction != "forward":
                    out.sum().backward()
            layer.zero_grad()

        seconds = once(run, device)
        return {"tokens": tokens, "seconds": seconds, "bytes": memory_peak(device) - before}

    def fits(tokens: int) -> dict | None:
        try:
            return once_with(tokens)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "alloc" not in str(error).lower():
                raise
        finally:
            layer.zero_grad()
            if is_cuda(device):
                torch.cuda.empty_cache()
        return None

    once_with(64)  # threads, kernels and workspaces are there before memory is counted
    before = memory_before(device)
    size = limit_memory(limit, device)
    return {**(search(fits, start) or {}), "limit": size}


def longest_contexts(names: list[str], options: argparse.Namespace) -> list[str]:
    """The rows of a table."""
    rows = table(["layer", "pass", "most tokens", "s", "GiB", "of GiB"])
    for name in names:
        for direction in options.directions:
            value = in_own_process(__file__, name, direction, options.device, options.memory_limit, options.start)
            if isinstance(value, str) or "tokens" not in value:
                cells = [value if isinstance(value, str) else "none fit", "-", "-"]
            else:
                cells = [f"{value['tokens']:,}", short(value["seconds"]), f"{value['bytes'] / GIB:.3f}"]
            cells.append("-" if isinstance(value, str) else f"{value['limit'] / GIB:.3f}")
            rows.append(f"| {name} | {direction} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    return [*rows, "", "The paper: 3.5 million tokens on a card of 24 GB."]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", required=True, help=argparse.SUPPRESS)
    print(json.dumps(longest_context(*json.loads(parser.parse_args().measure))))
