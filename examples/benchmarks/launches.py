"""Launches and memory of layers on a GPU, counted without one; and their times on one.

python examples/benchmarks/launches.py [LAYER ...]
python examples/benchmarks/launches.py --compiled GroupAttention   # calls of compiled code
python examples/benchmarks/launches.py --device cuda [--compiled] [LAYER ...]   # times at the large size

Compiled code is that of a CPU, but with the formulas that accelerators get.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import medians, once
from torch import nn
from torch.utils._pytree import tree_leaves

from tg_equiattn import nn as layers
from tg_equiattn.grids import PixelGrid
from tg_equiattn.groups import cyclic, dihedral

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("small", "large")
IMAGES = {"small": (2, 16), "large": (32, 64)}  # images, and pixels to a side
GRAPHS = {"small": (2, 32), "large": (128, 256)}  # graphs, and nodes of each
DEGREE = 8


class Layer(NamedTuple):
    """A module, and its inputs for so many images or graphs of a size."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    sizes: dict[str, tuple[int, int]] = GRAPHS

    def given(self, size: str) -> dict[str, Any]:
        return self.inputs(*self.sizes[size])


def on_images(make: Callable[[], nn.Module], *shape: int) -> Layer:
    return Layer(make, lambda images, side: {"x": torch.empty(images, *shape, side, side)}, IMAGES)


def group(kind: str, **options: Any) -> Layer:
    """32 channels of 8 rotations, 8 heads of 4 (lifting from 3 channels), windows of 5 x 5."""
    shape = (3,) if kind == "LiftingAttention" else (32, 8)
    options = {"head_channels": 4, "heads": 8, "kernel_size": 5, **options}
    return on_images(lambda: getattr(layers, kind)(cyclic(8), shape[0], 32, **options), *shape)


def on_clouds(kind: str, **options: Any) -> Layer:
    """Flat batches of clouds, of 32 scalars and 16 vectors."""

    def inputs(graphs: int, nodes: int) -> dict[str, Any]:
        n = graphs * nodes
        features = {"scalars": torch.empty(n, 32), "vectors": torch.empty(n, 16, 3), "pos": torch.empty(n, 3)}
        batch = torch.arange(graphs).repeat_interleave(nodes)
        return features | {"batch": batch, "batch_size": graphs, "max_num_nodes": nodes}

    return Layer(lambda: getattr(layers, kind)(32, 16, **options), inputs)


def performer_conv() -> nn.Module:
    from tg_equiattn.integrations.pyg import RelativePerformerConv

    return RelativePerformerConv(64, 64, 8, num_random_features=64, cutoff=3, method="features")


def graphs_of_pyg(graphs: int, nodes: int) -> dict[str, Any]:
    """64 channels and 8 neighbors."""
    n = graphs * nodes
    first = torch.arange(n).repeat_interleave(DEGREE)
    step = torch.arange(1, DEGREE + 1).repeat(n)
    edges = torch.stack([first // nodes * nodes + (first + step) % nodes, first])
    return {"x": torch.empty(n, 64), "edge_index": edges, "edge_offset": torch.zeros(n * DEGREE, 2),
            "batch": torch.arange(graphs).repeat_interleave(nodes), "batch_size": graphs}  # fmt: skip


class Pixels(nn.Module):
    """A Performer layer on a grid."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = layers.PerformerAttention(
            64, 64, 8, num_random_features=64, method="features", cutoff=4, **options
        )
        self.grids = {side: PixelGrid((side, side), 4) for _, side in IMAGES.values()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, grid=self.grids[math.isqrt(x.shape[1])])


def on_pixels(**options: Any) -> Layer:
    return Layer(lambda: Pixels(**options), lambda images, side: {"x": torch.empty(images, side**2, 64)}, IMAGES)


def timm_block() -> nn.Module:
    from timm.models.vision_transformer import Block

    return Block(384, 6, qkv_bias=True)


LAYERS: dict[str, Layer] = {
    "GroupLinear": on_images(lambda: layers.GroupLinear(cyclic(8), 32, 32), 32, 8),
    "RegularLayerNorm": on_images(lambda: layers.RegularLayerNorm(32), 32, 8),
    "RegularGlobalNorm": on_images(lambda: layers.RegularGlobalNorm(32), 32, 8),
    "GlobalPooling": on_images(layers.GlobalPooling, 32, 8),
    "GroupAttention": group("GroupAttention"),
    "GroupAttention, all pixels": group("GroupAttention", kernel_size=None),
    "GroupAttention, relative": group("GroupAttention", relation="relative"),
    "GroupAttention, ge_vit": group("GroupAttention", relation="ge_vit"),
    "LiftingAttention": group("LiftingAttention"),
    "FrameTransformerBlock": on_images(lambda: layers.FrameTransformerBlock(dihedral(4), 48), 48, 8),
    "timm's Block": Layer(timm_block, lambda images, side: {"x": torch.empty(images, side**2, 384)}, IMAGES),
    "GlobalGroupAttention": group("GlobalGroupAttention", relation="relative", padding_mode="circular"),
    "PerformerAttention, plain": on_pixels(position=None),
    "PerformerAttention, window": on_pixels(),
    "RelativePerformerConv": Layer(performer_conv, graphs_of_pyg),
    "CliffordMLP": Layer(
        lambda: layers.CliffordMLP(16, 16, num_blocks=2),
        lambda graphs, nodes: {"x": torch.empty(graphs * nodes, 16, 8)},
    ),
    "SE3HyenaOperator": on_clouds("SE3HyenaOperator"),
    "VectorSelfAttention": on_clouds("VectorSelfAttention"),
    "EwaldAttention": on_clouds("EwaldAttention", width=1.0, heads=2),
}


def measured(name: str, size: str) -> list[Any]:
    """Counts of one layer at one size, of a forward pass and of a training step."""
    from counting import count

    layer = LAYERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(count(layer.make(), layer.given(size)))


def compiled(name: str) -> list[str]:
    """The calls of a compiled layer of group attention at the small size, forward without gradients and in training:
    fused functions, the loops in them, and calls of libraries."""
    from torch._inductor.utils import run_and_get_code

    from tg_equiattn.group import heads

    torch.set_num_threads(1)  # with more, loops stand in parallel regions
    heads.by_operator = lambda *given: False  # type: ignore[assignment]
    layer, cells = LAYERS[name], []
    module = layer.make()
    inputs = {name: torch.randn_like(x) for name, x in layer.given("small").items()}

    def forward() -> None:
        with torch.no_grad():
            torch.compile(module)(**inputs)

    def training() -> None:
        torch.compile(module)(**{name: x.requires_grad_() for name, x in inputs.items()}).sum().backward()

    for run in (forward, training):
        torch._dynamo.reset()
        code = "\n".join(run_and_get_code(run)[1])
        found = (r"^cpp_fused\w* = ", r"^    \{$", r"(?:extern_kernels|torch\.ops\.aten)\.\w[\w.]*\(")
        functions, loops, libraries = (len(re.findall(text, code, re.MULTILINE)) for text in found)
        cells.append(f"{functions} ({loops} loops) + {libraries}")
    return cells


def timed(name: str, device: str, compiles: bool) -> list[str]:
    """Milliseconds by the clock, milliseconds of the device and kernels: of a forward pass, and of a training step."""
    from torch.profiler import ProfilerActivity, profile

    layer, cells = LAYERS[name], []
    module = layer.make().to(device)
    torch.compiler.reset()  # each layer is a program of its own
    module = torch.compile(module) if compiles else module
    inputs = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in layer.given("large").items()}
    inputs |= {n: torch.randn_like(x, requires_grad=True) for n, x in inputs.items() if is_feature(n, x)}

    def forward() -> None:
        with torch.no_grad():
            module(**inputs)

    def training() -> None:
        sum(x.square().mean() for x in tree_leaves(module(**inputs)) if x is not None).backward()

    for call in (forward, training):
        seconds = medians({name: call}, 5, device)[name]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            once(call, device)
        events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        cells += [f"{1e3 * seconds:.2f}", f"{sum(e.device_time for e in events) / 1e3:.2f}", f"{len(events):,}"]
    return cells


def is_feature(name: str, x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and name != "edge_offset"


def row(name: str, found: dict[str, list[Any]]) -> str:
    """A row of the table: launches at both sizes, and the peak of memory at the large one."""
    cells = [f"{found[size][way].operations:,}" for way in range(2) for size in SIZES]
    return f"| {name} | {' | '.join(cells)} | {found['large'][1].peak / 2**30:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", nargs="*", default=list(LAYERS), metavar="LAYER")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--device", help="cuda: time the layers there")
    args = parser.parse_args()
    if args.device:
        print("| layer | forward, ms | device | kernels | training, ms | device | kernels |" + f"\n{'|---' * 7}|")
        for name in args.layers:
            print(f"| {name} | {' | '.join(timed(name, args.device, args.compiled))} |", flush=True)
        return
    if args.compiled:
        print("| layer | forward | training |\n|---|---|---|")
        for name in args.layers:
            print(f"| {name} | {' | '.join(compiled(name))} |", flush=True)
        return
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    titles = ["layer", *(f"{way}, {size}" for way in ("forward", "training") for size in SIZES)]
    titles.append("peak, GiB")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name in args.layers:
        print(row(name, {size: measured(name, size) for size in SIZES}), flush=True)


if __name__ == "__main__":
    main()
