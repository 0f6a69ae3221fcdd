"""All that a first hour on a GPU should say: the device's tests, every benchmark at three sizes, and what else could
have been chosen where this library chooses by itself.

A choice is right if nothing beside it takes less than nine tenths of its time; the table says which are not:

graphs              random features or all pairs, as graph attention suggests
crystals, clouds    Ewald sums, direct sums or NUFFTs, by ``method="auto"`` of Ewald attention, eager
frames              what a compiler gets for windows in frames, the form that it fuses or the operator; beside them
                    the operator in eager mode, and torch's FlexAttention with positions by ``score_mod``
vectors             the same of vector attention
escnn               R2Conv beside attention in frames, eager and compiled: the host's layer, where nothing is chosen

Each measurement has a process of its own; what fails is said in the table, and the rest goes on. The table, with the
tables of the benchmarks behind it, is out/first_gpu/<name of the device>.md.

    python -W ignore examples/benchmarks/first_gpu.py --device cuda
    python -W ignore examples/benchmarks/first_gpu.py --tiny         # a dry run: small sizes, on the CPU
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from floor import machine_rates
from measure import DIRECTIONS, add_arguments, in_own_process, in_turn, is_cuda, machine, report, short, step, table
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad

from tg_equiattn import functional
from tg_equiattn.functional.backend import OPERATOR
from tg_equiattn.functional.group import attention
from tg_equiattn.functional.vector import attention as vectors
from tg_equiattn.grids import Window
from tg_equiattn.nn.performer.attention import PAIRS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = {  # flags of a run, and of a tiny one
    "linear_attention": ("--sizes 32 64 128", "--sizes 6 8 --variants SDPA window"),
    "graph_attention": ("--loads molecules 100,000 1,000,000", "--loads molecules --variants dense None"),
    "global_attention": ("--sizes 32 64 128", "--sizes 6 --variants window global"),
    "long_context": (
        "--tokens 1024 20000 131072 --lengths 1024 20000 131072 --patience 10",
        "--tokens 20 --lengths 17 --layers hyena --directions forward",
    ),
    "clifford_product": ("--tokens 16384 131072 1048576", "--tokens 50 --variants eager"),
    "group_attention, 14 x 14": ("--cases C8 --size 14", "--cases C4 --size 4 --batch 1 --variants eager"),
    "group_attention, 28 x 28": ("--cases C8 --size 28", "--cases C4 --size 5 --batch 1 --variants eager"),
    "group_attention, 56 x 56": ("--cases C8 --size 56", "--cases C4 --size 6 --batch 1 --variants eager"),
}
SIZES = {  # of choices: nodes of a graph, points, pixels a side, tokens, pixels a side
    "graphs": ((32, 128, 512), (8,)),
    "crystals": ((100, 1_000, 10_000), (10,)),
    "clouds": ((100, 1_000, 10_000), (10,)),
    "frames": ((16, 64, 128), (6,)),
    "vectors": ((256, 1_024, 4_096), (16,)),
    "escnn": ((16, 64, 128), (6,)),
}
ENOUGH = 0.9  # of the time of what is chosen: whatever takes less is told
LEAST = 1_000  # points of a NUFFT
PATIENCE = 900  # seconds of a benchmark
FEATURES, HEADS, WIDTH, ELEMENTS, SIDE = 64, 8, 4, 8, 5


def graphs(nodes: int, backward: bool, device: str) -> tuple[str, dict[str, Callable[[], None]]]:
    """What is chosen of several calls."""
    import graph_attention as graph

    calls = graph.crossover_calls("distance + values", nodes, FEATURES, backward, device)
    return "pairs" if nodes <= PAIRS * FEATURES else "features", calls


def ewald(
    points: int, backward: bool, device: str, *, crystal: bool = True
) -> tuple[str, dict[str, Callable[[], None]]]:
    from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

    from tg_equiattn.functional.waves.nufft import nufft_available

    irreps, side = "32x0e+16x1o", points ** (1 / 3)
    x, pos = torch.randn(points, 80, device=device), side * torch.rand(points, 3, device=device)
    more = {"cell": side * torch.eye(3, device=device)} if crystal else {}
    methods = ["auto", "ewald" if crystal else "direct"]
    if points >= LEAST and nufft_available(torch.device(device).type):
        methods.append("nufft")
    calls = {}
    for method in methods:
        torch.manual_seed(0)
        layer = IrrepsEwaldAttention(irreps, irreps, width=1.0, method=method).to(device)
        calls[method] = step(layer, functools.partial(layer, x, pos, **more), backward)
    return "auto", calls


def operator(*_: object) -> str:
    """Choose the operator: a function that a compiler can trace, as a mock it cannot."""
    return OPERATOR


def compiled(function: Callable[..., Tensor], module: object | None = None) -> Callable[..., Tensor]:
    """A compiled function; given a module of ours, with the operator that it would not take on an accelerator."""
    made = torch.compile(function, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        chosen = mock.patch.object(module, "choose_form", operator) if module else contextlib.nullcontext()
        with chosen:
            return made()

    return call


def attention_in_frames(side: int, backward: bool, device: str) -> tuple[str, dict[str, Callable[[], None]]]:
    """8 heads of 4 channels of 8 elements, windows of 5 x 5, 16 images."""
    window, sizes = Window(2, SIDE), (16 if is_cuda(device) else 1, HEADS, WIDTH, ELEMENTS, side, side)
    shapes = sizes, sizes, sizes, (ELEMENTS, window.count(), WIDTH), (HEADS, ELEMENTS, window.count())
    operands = nn.ParameterList(torch.randn(shape, device=device) for shape in shapes)

    def ours() -> Tensor:
        *tensors, bias = operands
        return functional.frame_attention(*tensors, window=window, space_bias=bias)

    calls = {"compiled": compiled(ours), "compiled operator": compiled(ours, attention), "operator": ours}
    if is_cuda(device) or not backward:  # FlexAttention has no backward on the CPU
        calls["FlexAttention"] = functools.partial(by_flex_attention(side, device), *operands)
    return "compiled", {name: step(operands, call, backward) for name, call in calls.items()}


def by_flex_attention(side: int, device: str) -> Callable[..., Tensor]:
    """The same by torch's FlexAttention, which skips blocks of pairs without a window's."""
    reach = SIDE // 2

    def steps(i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return j // side - i // side + reach, j % side - i % side + reach

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        down, right = steps(i, j)
        return (down >= 0) & (down < SIDE) & (right >= 0) & (right < SIDE)

    blocks = create_block_mask(near, None, None, side**2, side**2, device=device)
    attend = torch.compile(flex_attention, dynamic=False)

    def run(query: Tensor, key: Tensor, value: Tensor, rho: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (x.flatten(4).permute(0, 1, 3, 4, 2).flatten(1, 2) for x in (query, key, value))  # (B, e H, N, C)
        q = q * WIDTH**-0.5
        at = torch.matmul(q, rho.mT.repeat(HEADS, 1, 1)) + bias.flatten(0, 1)[:, None]  # of every place of a window

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            down, right = (x.clamp(0, SIDE - 1) for x in steps(i, j))
            return value + at[b, h, i, down * SIDE + right]

        wide = (pad(x, (0, 16 - WIDTH)) for x in (q, k, v))  # the narrowest heads that it takes
        out = attend(*wide, score_mod=score, block_mask=blocks, scale=1.0)[..., :WIDTH]
        return out.unflatten(1, (HEADS, ELEMENTS)).permute(0, 1, 4, 2, 3).unflatten(-1, (side, side))

    return run


def vector_attention(tokens: int, backward: bool, device: str) -> tuple[str, dict[str, Callable[[], None]]]:
    """16 vectors of every token, one sequence."""
    operands = nn.ParameterList(torch.randn(1, tokens, 16, 3, device=device) for _ in "qkv")

    def ours() -> Tensor:
        return functional.vector_attention(*operands)

    calls = {"compiled": compiled(ours), "compiled operator": compiled(ours, vectors), "operator": ours}
    return "compiled", {name: step(operands, call, backward) for name, call in calls.items()}


def beside_escnn(side: int, backward: bool, device: str) -> tuple[str, dict[str, Callable[[], None]]]:
    """8 regular fields of C8, windows of 5 x 5."""
    with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
        from escnn import gspaces
        from escnn import nn as enn
    from tg_equiattn.integrations.escnn import R2GroupAttention

    space = gspaces.rot2dOnR2(8)
    fields = enn.FieldType(space, 8 * [space.regular_repr])
    x = torch.randn(16 if is_cuda(device) else 1, fields.size, side, side, device=device)
    convolution = enn.R2Conv(fields, fields, SIDE, padding=SIDE // 2)
    layers = {"R2Conv": convolution, "frames": R2GroupAttention(fields, fields, heads=2, kernel_size=SIDE)}
    layers = {name: layer.export().to(device) for name, layer in layers.items()}
    calls = {name: functools.partial(layer, x) for name, layer in layers.items()}
    calls["frames, compiled"] = compiled(calls["frames"])
    return "", {name: step(layers[name.split(",")[0]], call, backward) for name, call in calls.items()}


CHOICES = {
    "graphs": graphs,
    "crystals": ewald,
    "clouds": functools.partial(ewald, crystal=False),
    "frames": attention_in_frames,
    "vectors": vector_attention,
    "escnn": beside_escnn,
}


def seconds(choice: str, size: int, direction: str, repeats: int, device: str) -> dict:
    """Of everything there is to choose from, in turn; and what is chosen."""
    torch.manual_seed(0)
    chosen, calls = CHOICES[choice](size, direction == DIRECTIONS[1], device)
    return {
        "chosen": chosen,
        "seconds": dict(zip(calls, in_turn(list(calls.values()), repeats, 2, device), strict=True)),
    }


def verdict(choice: str, size: int, direction: str, found: dict) -> str:
    """What a choice would better be; empty where it is right, or nothing is chosen."""
    times, chosen = found["seconds"], found["chosen"]
    if not chosen:
        return ""
    best = min(times, key=times.get)
    if times[best] >= ENOUGH * times[chosen]:
        return ""
    return (
        f"- {choice}, {size:,}, {direction}: {chosen!r} is chosen, {short(1e3 * times[chosen])} ms; {best!r} takes "
        f"{times[best] / times[chosen]:.2f} times that"
    )


def try_choices(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The rows of all choices, and which would change."""
    rows, changes = table(["choice", "size", "pass", "chosen", "ms"]), []
    for choice, direction in ((c, d) for c in options.choices for d in DIRECTIONS):
        for size in SIZES[choice][options.tiny]:
            try:
                found = in_own_process(__file__, choice, size, direction, options.repeats, options.device)
            except SystemExit as error:
                found = f"failed: {str(error).strip().splitlines()[-1][:200]}"
            if isinstance(found, str):
                rows.append(f"| {choice} | {size:,} | {direction} | - | {found} |")
            else:
                times = ", ".join(f"{name} {short(1e3 * value)}" for name, value in found["seconds"].items())
                rows.append(f"| {choice} | {size:,} | {direction} | {found['chosen'] or '-'} | {times} |")
                changes += filter(None, [verdict(choice, size, direction, found)])
            print(rows[-1], flush=True)
    return rows, changes


def run(command: list[str], patience: float | None = None) -> tuple[int, str]:
    """The exit status, and what a command says last."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        return 1, f"not done after {patience:.0f} s"
    said = [*done.stdout.splitlines(), *(done.stderr.splitlines() if done.returncode else [])]
    return done.returncode, next((line for line in reversed(said) if line.strip()), "nothing said")


def run_benchmarks(options: argparse.Namespace, rates: list[str]) -> list[str]:
    """The tables of all benchmarks, or why there is none."""
    tables = []
    for name in options.benchmarks:
        script, output = name.split(",")[0], options.output.parent / f"{re.sub(r'[^a-z0-9]+', '_', name)}.md"
        flags = [*BENCHMARKS[name][options.tiny].split(), "--device", options.device]
        output.unlink(missing_ok=True)
        flags += ["--repeats", str(options.repeats), "--rates", *rates, "--output", str(output)]
        status, said = run([sys.executable, "-W", "ignore", f"examples/benchmarks/{script}.py", *flags], PATIENCE)
        text = output.read_text() if output.exists() else f"failed: {said}"
        tables += [f"## {name}", "", text if not status else f"{text}\nexit status {status}", ""]
        print(f"{name}: {'done' if not status else said}", flush=True)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a dry run")
    parser.add_argument("--tests", nargs="*", default=["tests", "-m", "device"], help="what pytest runs; nothing: none")
    parser.add_argument("--benchmarks", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--choices", nargs="*", choices=CHOICES, default=list(CHOICES))
    add_arguments(parser, "out/first_gpu/")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(seconds(*json.loads(options.measure))))
        return

    name = torch.cuda.get_device_name(options.device) if is_cuda(options.device) else "CPU"
    options.output = options.output.resolve() / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.md"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    said = "not run"
    if options.tests:
        said = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options.tests])[1].strip("= ")
        print(f"tests: {said}", flush=True)
    rates = [str(rate) for rate in machine_rates(options) if rate]
    rows, changes = try_choices(options)
    tables = run_benchmarks(options, rates)
    changes = changes or ["Nothing: no choice is beaten by a tenth."]
    rows = [f"Tests: {said}", "", "## What would change", "", *changes, "", "## Choices", "", *rows, "", *tables]
    report(f"# {name}\n\n{machine(options.device)}; rates {', '.join(rates)}", rows, options.output)


if __name__ == "__main__":
    main()
