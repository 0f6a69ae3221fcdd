"""Layers at their defaults beside what a user has instead, side by side in one process.

Every case is one layer at its defaults, and a layer that a user may have instead. Cases are rows of ``CASES`` in
default_cases.py; each returns a :class:`Case` for a size. Columns are the time of the other layer in milliseconds and
the time of ours as a multiple of it: without gradients (eval mode) and a training pass, and the memory that autograd
keeps for the backward pass. A second table has one call at a tiny size.

Times are medians of interleaved rounds, of the processor on one thread, or with --device cuda by the clock.

    python -W ignore examples/benchmarks/defaults.py                  # a few minutes
    python -W ignore examples/benchmarks/defaults.py --device cuda
    python -W ignore examples/benchmarks/defaults.py --sizes --repeats 15    # tiny calls alone
    python -W ignore examples/benchmarks/defaults.py --readme    # the calls that README advertises
    python -W ignore examples/benchmarks/defaults.py --others    # the layer of a paper, and heads of Ewald attention
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from default_cases import CASES, OTHERS, README, SIDES, Case, shape_of
from measure import add_device, medians
from torch import Tensor


def kept(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that autograd keeps for the backward pass, without parameters."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = module(*inputs)
    for parameter in module.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del out
    return sum(storages.values())


def forward(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            module(*inputs)

    return run


def training(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    given = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    return lambda: module(*given).square().sum().backward()


def measure(case: Case, repeats: int) -> list[str]:
    """The cells of a row."""
    device, cells = str(case.inputs[0].device), []
    modules = {"theirs": case.theirs, "ours": case.ours}
    for direction in (forward, training):
        for module in modules.values():
            module.train(direction is training)
        taken = medians({name: direction(module, case.inputs) for name, module in modules.items()}, repeats, device)
        cells.append(f"{1e3 * taken['theirs']:.1f}")
        cells += [f"{taken[name] / taken['theirs']:.2f}" for name in modules if name != "theirs"]
    given = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in case.inputs)
    bytes_kept = [kept(module, given) for module in (case.theirs, case.ours)]
    cells += [f"{bytes_kept[0] / 2**20:.2f}", f"{bytes_kept[1] / bytes_kept[0]:.1f}"]
    return cells


def tiny(make: Callable[[str], Case], repeats: int, device: str) -> list[str]:
    case = make("tiny").to(device)
    cells, modules = [], {"theirs": case.theirs, "ours": case.ours}
    for direction in (forward, training):
        runs = {name: direction(m.train(direction is training), case.inputs) for name, m in modules.items()}
        cells += [f"{1e3 * taken:.2f}" for taken in medians(runs, 20 * repeats, device).values()]
    return cells


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table, unless it is empty."""
    if not rows:
        return
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", nargs="*", choices=list(SIDES)[1:], default=list(SIDES)[1:])
    parser.add_argument("--cases", nargs="*", help="names of cases; default: all", choices=list(CASES))
    parser.add_argument("--readme", action="store_true", help="the calls that README advertises, without tiny sizes")
    parser.add_argument("--others", nargs="*", choices=list(OTHERS), help="rows of a size of their own alone, or some")
    add_device(parser)
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    chosen = {name: CASES[name] for name in options.cases or CASES} if options.cases != [] else {}
    chosen = README if options.readme else {} if options.others is not None else chosen
    rows, tiny_rows = [], []
    for name in () if options.others is None else options.others or OTHERS:
        beside, make_one = OTHERS[name]
        rows.append([name, beside, *measure(make_one().to(device), options.repeats)])
    for name, (beside, make) in chosen.items():
        for size in options.sizes:
            cells = measure(make(size).to(device), options.repeats)
            rows.append([f"{name}, {shape_of(name, size)}", beside, *cells])
        if not options.readme:
            tiny_rows.append([name, beside, *tiny(make, options.repeats, device)])
    head = ["layer", "beside", "forward, ms", "ours", "training, ms", "ours", "kept, MiB", "ours"]
    table(head, rows)
    table(["one tiny call", "beside", "forward, ms", "ours, ms", "training, ms", "ours, ms"], tiny_rows)


if __name__ == "__main__":
    main()
