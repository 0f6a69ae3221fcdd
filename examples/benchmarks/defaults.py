"""Layers at their defaults beside what a user has instead, side by side in one process.

Every case is one layer at its defaults, and a layer that a user may have instead. Cases are rows of ``CASES`` in
default_cases.py; each returns a :class:`Case` for a size. Columns are the time of the other layer in milliseconds and
the time of ours as a multiple of it: without gradients (eval mode), a training pass, both with ``torch.compile`` of our
layer, and the memory that autograd keeps for the backward pass. A second table has one call at a tiny size. Last, a
training step of a Wide ResNet with three of nine convolutions replaced by default blocks, as a multiple of the step
before.

Times are medians of interleaved rounds, of the processor on one thread, or with --device cuda by the clock.

    python -W ignore examples/benchmarks/defaults.py                  # a few minutes
    python -W ignore examples/benchmarks/defaults.py --compiled       # with torch.compile, too
    python -W ignore examples/benchmarks/defaults.py --device cuda
    python -W ignore examples/benchmarks/defaults.py --sizes --networks --repeats 15    # tiny calls alone
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from default_cases import CASES, SIDES, Case, gspaces, nn, shape_of
from measure import add_device, medians
from tg_equiattn.integrations.escnn import R2AttentionBlock, R2GlobalAttention, R2GroupAttention
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


def measure(make: Callable[[str], Case], size: str, repeats: int, compiled: bool, device: str) -> list[str]:
    """The cells of a row."""
    case, cells = make(size).to(device), []
    modules = {"theirs": case.theirs, "ours": case.ours}
    if compiled:
        torch._dynamo.reset()  # each case is a program of its own
        modules["compiled"] = torch.compile(case.compilable)
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


class WideResNet(torch.nn.Module):
    """Nine convolutions of 3 x 3 on as many fields, of which ``replace`` may exchange three."""

    def __init__(self, rotations: int, channels: int, replace: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        gspace = gspaces.rot2dOnR2(rotations)
        image, hidden = (
            nn.FieldType(gspace, k * [r]) for k, r in ((3, gspace.trivial_repr), (channels, gspace.regular_repr))
        )
        self.image, self.stem = image, convolution(image, hidden)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                convolution(hidden, hidden),
                replace(hidden) if replace is not None and number else convolution(hidden, hidden),
            )
            for number in range(4)
        )
        self.pool, self.classifier = nn.GroupPooling(hidden), torch.nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(nn.GeometricTensor(x, self.image))
        for block in self.blocks:
            y = y + block(y)
        return self.classifier(self.pool(y).tensor.mean((2, 3)))


def convolution(given: Any, hidden: Any, side: int = 3) -> Any:
    convolve = nn.R2Conv(given, hidden, side, padding=side // 2, bias=False)
    return nn.SequentialModule(convolve, nn.InnerBatchNorm(hidden), nn.ReLU(hidden))


REPLACED: dict[str, Callable[[Any], Any]] = {
    "5 x 5 convolutions": lambda hidden: convolution(hidden, hidden, 5),
    "R2GroupAttention": lambda hidden: R2AttentionBlock(R2GroupAttention(hidden, hidden)),
    "R2GlobalAttention": lambda hidden: R2AttentionBlock(R2GlobalAttention(hidden, hidden)),
    "R2GroupAttention, relative": lambda hidden: R2AttentionBlock(
        R2GroupAttention(hidden, hidden, relation="relative")
    ),
}
# fields with which the network of default blocks has about as many parameters as that of convolutions with 16
EQUAL = {4: 18, 8: 19}


def networks(rotations: int, repeats: int, device: str) -> list[list[str]]:
    """A training step of the network with each replacement, as a multiple of the step without."""
    x = torch.randn(4, 3, 32, 32, device=device)
    models = {"3 x 3 convolutions": WideResNet(rotations, 16)}
    models |= {name: WideResNet(rotations, 16, replace) for name, replace in REPLACED.items()}
    models["R2GroupAttention, equal parameters"] = WideResNet(rotations, EQUAL[rotations], REPLACED["R2GroupAttention"])

    def step(model: torch.nn.Module) -> Callable[[], None]:
        adam = torch.optim.Adam(model.parameters())

        def run() -> None:
            adam.zero_grad()
            model(x).square().mean().backward()
            adam.step()

        return run

    taken = medians({name: step(model.to(device)) for name, model in models.items()}, repeats, device)
    first, *_ = taken.values()
    return [
        [f"C{rotations}, {name}", f"{sum(p.numel() for p in models[name].parameters()):,}", f"{1e3 * t:.0f}",
         f"{t / first:.2f}"]
        for name, t in taken.items()
    ]  # fmt: skip


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
    parser.add_argument("--compiled", action="store_true", help="torch.compile our layers, too")
    parser.add_argument("--sizes", nargs="*", choices=list(SIDES)[1:], default=list(SIDES)[1:])
    parser.add_argument("--cases", nargs="*", help="names of cases; default: all", choices=list(CASES))
    parser.add_argument("--networks", type=int, nargs="*", default=[4, 8], help="rotations of the Wide ResNets")
    add_device(parser)
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    chosen = {name: CASES[name] for name in options.cases or CASES} if options.cases != [] else {}
    compiled = ["compiled"] if options.compiled else []
    rows, tiny_rows = [], []
    for name, (beside, make) in chosen.items():
        for size in options.sizes:
            cells = measure(make, size, options.repeats, options.compiled, device)
            rows.append([f"{name}, {shape_of(name, size)}", beside, *cells])
        tiny_rows.append([name, beside, *tiny(make, options.repeats, device)])
    head = ["layer", "beside", "forward, ms", "ours", *compiled, "training, ms", "ours", *compiled, "kept, MiB", "ours"]
    table(head, rows)
    table(["one tiny call", "beside", "forward, ms", "ours, ms", "training, ms", "ours, ms"], tiny_rows)
    results = [row for rotations in options.networks for row in networks(rotations, options.repeats, device)]
    table(["Wide ResNet", "parameters", "training step, ms", "times"], results)


if __name__ == "__main__":
    main()
