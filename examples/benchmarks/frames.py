"""Time and memory of attention in frames beside escnn's convolution of as many fields, side by side in one run.

Content is active: the heads that look by content do from the start (their maps are shown to change with the input), and
parameters are random. Heads are those of the layers' defaults, of the digits of docs/experiments.md, and all of them by
content. Times are medians of rounds in turn, one thread.

    python -W ignore examples/benchmarks/frames.py                  # a few minutes
    python -W ignore examples/benchmarks/frames.py --compiled       # with torch.compile, too
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import torch

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

from tg_equiattn.integrations.escnn import R2GroupAttention, R3GroupAttention

# name, gspace, fields, window, side, images, heads, width of a head, heads that look by content
CASES = [
    ("C8, 8 fields, 5 x 5, 2 heads of 4", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 2, 4, None),
    ("the same, both by content", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 2, 4, 2),
    ("C8, 8 fields, 5 x 5, 15 heads of 1", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 15, 1, None),
    ("C8, 32 fields, 7 x 7, 8 heads of 4", gspaces.rot2dOnR2(8), 32, 7, 32, 4, 8, 4, None),
    ("the same, all by content", gspaces.rot2dOnR2(8), 32, 7, 32, 4, 8, 4, 8),
    ("cube, 4 fields, 3 x 3 x 3, 2 heads of 4", gspaces.octaOnR3(), 4, 3, 16, 1, 2, 4, None),
    ("the same, both by content", gspaces.octaOnR3(), 4, 3, 16, 1, 2, 4, 2),
]


def medians(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds of each, measured in turn after two calls to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def looks_at_content(layer: torch.nn.Module, x: nn.GeometricTensor) -> bool:
    """Whether maps of the first head change with the input."""
    pixel = [side // 2 for side in x.shape[2:]]
    part = nn.GeometricTensor(x.tensor[:1], x.type)
    other = nn.GeometricTensor(torch.randn_like(part.tensor), x.type)
    one, two = (layer.attention_map(y, pixel)[:, 0] for y in (part, other))
    return bool((one - two).abs().max() > 1e-3)


def measure(case: tuple, repeats: int, compiled: bool) -> list[str]:
    name, gspace, channels, kernel, side, batch, heads, width, content = case
    flat = gspace.dimensionality == 2
    fields = nn.FieldType(gspace, channels * [gspace.regular_repr])
    convolution = (nn.R2Conv if flat else nn.R3Conv)(fields, fields, kernel, padding=kernel // 2)
    layer = (R2GroupAttention if flat else R3GroupAttention)(
        fields, fields, heads=heads, head_channels=width, kernel_size=kernel, content_heads=content, encoding="joint"
    )
    x = nn.GeometricTensor(torch.randn(batch, fields.size, *[side] * gspace.dimensionality), fields)
    with torch.no_grad():
        assert looks_at_content(layer, x)
    modules = {"convolution": convolution, "frames": layer}
    plain = {"convolution": x, "frames": x}
    if compiled:
        torch._dynamo.reset()  # each case is a program of its own
        exported = layer.export()
        layer.train()
        modules["compiled"], plain["compiled"] = torch.compile(exported), x.tensor

    def forward(which: str) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                modules[which](plain[which])

        return run

    def training(which: str) -> Callable[[], None]:
        given = x.tensor.clone().requires_grad_()
        seen = given if which == "compiled" else nn.GeometricTensor(given, fields)

        def run() -> None:
            out = modules[which](seen)
            (out if which == "compiled" else out.tensor).square().sum().backward()

        return run

    row = [name]
    for make in (forward, training):
        for module in modules.values():
            module.train(make is training)
        taken = medians({which: make(which) for which in modules}, repeats)
        row.append(f"{1e3 * taken['convolution']:.1f}")
        row += [f"{taken[which] / taken['convolution']:.2f}" for which in modules if which != "convolution"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compiled", action="store_true", help="torch.compile the exported layer, too")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    more = ["compiled"] if options.compiled else []
    head = ["", "convolution, ms", "frames", *more, "with backward, ms", "frames", *more]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for number, case in enumerate(CASES):
        if options.cases is None or number in options.cases:
            print("| " + " | ".join(measure(case, options.repeats, options.compiled)) + " |", flush=True)


if __name__ == "__main__":
    main()
