"""What the benchmarks share: one measurement a process, its time and peak memory, and the cells of a table."""

from __future__ import annotations

import argparse
import gc
import json
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

GIB = 2**30
DIRECTIONS = ("forward", "forward+backward")


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def measure(prepare: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], backward: bool, repeats: int, warmups: int,
            cuda: bool) -> dict:  # fmt: skip
    """Median seconds of a call, and peak bytes above what was there before the layer and its tables were made."""
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports (Linux)
    layer, call = prepare()

    def run() -> float:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = call()
            if backward:
                out.sum().backward()
        del out
        layer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(warmups):
        run()
    seconds = statistics.median(run() for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    return {"seconds": seconds, "bytes": peak - before}


def in_own_process(script: str, *arguments) -> dict | str:
    """The measurement of ``script --measure`` in a new process, or why there is none."""
    command = [sys.executable, "-W", "ignore", script, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -signal.SIGKILL or re.search("OutOfMemoryError|can't allocate memory", done.stderr):
        return "out of memory"
    if re.search("InvalidCxxCompiler|No working C\\+\\+ compiler|Cannot find a working triton", done.stderr):
        return "no compiler"
    if re.search("No module named", done.stderr):
        return "not installed"
    raise SystemExit(f"{arguments} failed:\n{done.stderr}")


def available(device: str) -> int:
    """Free memory in bytes."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def cell(value: dict | str, base: dict | str, what: str) -> str:
    """Seconds or GiB of a measurement, with the baseline's multiple of it in brackets."""
    if isinstance(value, str):
        return value
    text = f"{value['seconds']:.3f}" if what == "seconds" else f"{value['bytes'] / GIB:.2f}"
    if isinstance(base, str) or value is base:
        return text
    return f"{text} ({base[what] / max(value[what], 1e-9):.1f}x)"


def add_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """The flags of every benchmark."""
    parser.add_argument("--repeats", type=int, default=5, help="timed runs after warm-up (default 5)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--measure", help=argparse.SUPPRESS)


def machine(device: str) -> str:
    """What the numbers were measured on."""
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, {name}"


def report(note: str, rows: list[str], output: Path) -> None:
    """Print a table and write it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([note, "", *rows]) + "\n")
    print(f"\n{note}\n\n" + "\n".join(rows) + f"\n\nwritten to {output}")
