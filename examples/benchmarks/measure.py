"""What the benchmarks share: one measurement a process, its time and peak memory, and the cells of a table.

On CUDA a time is that between two events on the stream, several calls between them where one is short, after warm-up
until calls take equally long (compiled, tuned, allocated); peak memory is the allocator's. On the CPU it is the wall
clock, and the process's resident memory (Linux). Times are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "studies"))  # where the harness lies
from harness.devices import add_device, index_of, is_cuda

GIB = 2**30
DIRECTIONS = ("forward", "forward+backward")
SHORT, ENOUGH = 1e-3, 5e-3  # seconds: a call this short is repeated between two events until there are enough
MOST_WARMUPS = 20
REASONS = {
    "OutOfMemoryError|can't allocate memory": "out of memory",
    "No module named": "not installed",
}


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def memory_before(device: str) -> int:
    """Bytes in use; from here on the peak counts."""
    gc.collect()
    if is_cuda(device):
        torch.cuda.set_device(index_of(device))  # the process is this measurement's own
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # the libraries' workspace is not the layer's
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    return before


def memory_peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if is_cuda(device) else resident("VmHWM")


def once(run: Callable[[], None], device: str) -> float:
    """Seconds of one call by the clock, whatever it left to the device included."""
    if is_cuda(device):
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if is_cuda(device):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def warm_up(run: Callable[[], None], warmups: int, device: str) -> float:
    """Call ``warmups`` times, and on CUDA at least three times and until the last two took about as long; with 0,
    for calls so long that the first tells, once on CUDA and never on the CPU. Returns the last time."""
    last = math.inf
    if not is_cuda(device):
        for _ in range(warmups):
            last = once(run, device)
        return last
    for n in range(1, MOST_WARMUPS + 1):
        before, last = last, once(run, device)
        if not warmups or (n >= max(3, warmups) and before < 1.5 * last):
            break
    return last


def timings(run: Callable[[], None], repeats: int, expected: float, device: str) -> list[float]:
    """Seconds of a call, ``repeats`` times; ``expected`` says how many calls go between two events."""
    if not is_cuda(device):
        return [once(run, device) for _ in range(repeats)]
    calls = math.ceil(ENOUGH / max(expected, 1e-6)) if expected < SHORT else 1
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        for _ in range(calls):
            run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 / calls for start, end in pairs]


def step(layer: nn.Module, call: Callable[[], Tensor], backward: bool) -> Callable[[], None]:
    """A call, with its backward pass where wanted; nothing of it is left."""

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = call()
            if backward:
                out.sum().backward()
        del out
        layer.zero_grad()

    return run


def in_turn(runs: list[Callable[[], None]], repeats: int, warmups: int, device: str) -> list[float]:
    """Median seconds of several calls that take turns, so that what else the machine does slows all of them."""
    for run in runs:
        warm_up(run, warmups, device)
    seconds = zip(*([once(run, device) for run in runs] for _ in range(repeats)), strict=True)
    return [statistics.median(x) for x in seconds]


def medians(
    runs: dict[str, Callable[[], object]], repeats: int, device: str = "cpu", warmups: int = 2
) -> dict[str, float]:
    """Seconds of each, measured in turn after some calls to warm up: the processor's time, and on CUDA by the clock."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + warmups):
        for name, run in runs.items():
            start = time.process_time()
            seconds = once(run, device)
            if number >= warmups:
                times[name].append(seconds if is_cuda(device) else time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(prepare: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], backward: bool, repeats: int, warmups: int,
            device: str) -> dict:  # fmt: skip
    """Median seconds of a call, and peak bytes above what was there before the layer and its tables were made."""
    before = memory_before(device)
    run = step(*prepare(), backward)
    expected = warm_up(run, warmups, device)
    if is_cuda(device):
        torch.cuda.reset_peak_memory_stats()  # tuning a kernel takes memory that calling it does not
    seconds = statistics.median(timings(run, repeats, expected, device))
    return {"seconds": seconds, "bytes": memory_peak(device) - before}


def in_own_process(script: str, *arguments) -> dict | str:
    """The measurement of ``script --measure`` in a new process, or why there is none."""
    command = [sys.executable, "-W", "ignore", script, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -signal.SIGKILL:
        return "out of memory"
    for pattern, reason in REASONS.items():
        if re.search(pattern, done.stderr):
            return reason
    raise SystemExit(f"{arguments} failed:\n{done.stderr}")


def short(x: float) -> str:
    """Three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def cell(value: dict | str, base: dict | str, what: str) -> str:
    """Seconds or GiB of a measurement, with the baseline's multiple of it in brackets."""
    if isinstance(value, str):
        return value
    text = short(value["seconds"]) if what == "seconds" else f"{value['bytes'] / GIB:.3f}"
    if isinstance(base, str) or value is base:
        return text
    return f"{text} ({base[what] / max(value[what], 1e-9):.1f}x)"


def table(columns: list[str]) -> list[str]:
    """The head of a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def add_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """The flags of every benchmark."""
    parser.add_argument("--repeats", type=int, default=5, help="timed runs after warm-up (default 5)")
    add_device(parser)
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--measure", help=argparse.SUPPRESS)


def machine(device: str) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if is_cuda(device) else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, {name}"


def report(note: str, rows: list[str], output: Path) -> None:
    """Print a table and write it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([note, "", *rows]) + "\n")
    print(f"\n{note}\n\n" + "\n".join(rows) + f"\n\nwritten to {output}")
