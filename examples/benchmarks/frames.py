"""Time and memory of attention in frames beside escnn's convolution of as many fields, side by side in one run.

Beside them stand the relation "relative", and lifting beside a convolution from trivial fields.
Three choices of heads are timed: the layers' defaults, those of the digits of docs/results_escnn.md, and all by
content. Times are medians of rounds in turn, on one thread. They are the processor's, so that other work on the machine
does not count.
Memory is the peak of what forward and backward allocate above what was there, gradients included, in tensors of the
scores of all heads, (B, heads, places, |H|, *spatial) in float32; of "relative", which has |H| times as many, too.

    python -W ignore examples/benchmarks/frames.py                  # a few minutes
    python -W ignore examples/benchmarks/frames.py --compiled       # with torch.compile, too
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from measure import medians
from torch.profiler import ProfilerActivity, profile

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

from tg_equiattn.integrations.escnn import R2GroupAttention, R2LiftingAttention, R3GroupAttention, R3LiftingAttention


def by_content(heads: int) -> dict[str, Any]:
    return {"content_heads": heads}


# name, gspace, fields, window, side, images, heads, width of a head, further options; None for lifting
CASES = [
    ("C8, 8 fields, 5 x 5, 2 heads of 4", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 2, 4, {}),
    ("the same, both by content", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 2, 4, by_content(2)),
    ("the same, relative", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 2, 4, {"relation": "relative"}),
    ("the same, lifting", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 2, 4, None),
    ("C8, 8 fields, 5 x 5, 15 heads of 1", gspaces.rot2dOnR2(8), 8, 5, 32, 4, 15, 1, {}),
    ("C8, 32 fields, 7 x 7, 8 heads of 4", gspaces.rot2dOnR2(8), 32, 7, 32, 4, 8, 4, {}),
    ("the same, all by content", gspaces.rot2dOnR2(8), 32, 7, 32, 4, 8, 4, by_content(8)),
    ("cube, 4 fields, 3 x 3 x 3, 2 heads of 4", gspaces.octaOnR3(), 4, 3, 16, 1, 2, 4, {}),
    ("the same, both by content", gspaces.octaOnR3(), 4, 3, 16, 1, 2, 4, by_content(2)),
    ("the same, relative", gspaces.octaOnR3(), 4, 3, 16, 1, 2, 4, {"relation": "relative"}),
    ("the same, lifting", gspaces.octaOnR3(), 4, 3, 16, 1, 2, 4, None),
]


def peak(run: Callable[[], None]) -> int:
    """Bytes of the largest sum of tensors that a call allocates and has not freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    result = record.profiler.kineto_results  # the only place that has allocations in their order
    held = most = 0
    for event in sorted((e for e in result.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(case: tuple, repeats: int, compiled: bool) -> list[str]:
    name, gspace, channels, kernel, side, batch, heads, width, options = case
    flat, lifts = gspace.dimensionality == 2, options is None
    image, regular = (nn.FieldType(gspace, channels * [r]) for r in (gspace.trivial_repr, gspace.regular_repr))
    fields = image if lifts else regular
    convolution = (nn.R2Conv if flat else nn.R3Conv)(fields, regular, kernel, padding=kernel // 2)
    kinds = (R2LiftingAttention, R3LiftingAttention) if lifts else (R2GroupAttention, R3GroupAttention)
    layer = kinds[not flat](
        fields, regular, heads=heads, head_channels=width, kernel_size=kernel,
        encoding="joint", **(options or {}),
    )  # fmt: skip
    x = nn.GeometricTensor(torch.randn(batch, fields.size, *[side] * gspace.dimensionality), fields)
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
    score = 4 * batch * heads * kernel**gspace.dimensionality * gspace.fibergroup.order() * side**gspace.dimensionality
    for which in ("convolution", "frames"):
        modules[which].zero_grad()
        row.append(f"{peak(training(which)) / score:.2f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compiled", action="store_true", help="torch.compile the exported layer, too")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    more = ["compiled"] if options.compiled else []
    head = ["", "convolution, ms", "frames", *more, "with backward, ms", "frames", *more, "its memory", "frames"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for number, case in enumerate(CASES):
        if options.cases is None or number in options.cases:
            print("| " + " | ".join(measure(case, options.repeats, options.compiled)) + " |", flush=True)


if __name__ == "__main__":
    main()
