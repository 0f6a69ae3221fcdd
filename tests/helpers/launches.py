"""The table of docs/performance.md of what layers ask of a GPU, counted without one, and what its test recounts.

PYTHONPATH=tests/helpers python tests/helpers/launches.py [--layers NAME ...] [--sizes small large] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import group_layers
import torch
from compiling import compiled
from counting import count
from torch import nn

from tg_equiattn import nn as layers
from tg_equiattn.grids import PixelGrid
from tg_equiattn.groups import cyclic

TABLE = pathlib.Path(__file__).parents[2] / "examples" / "results" / "benchmarks" / "launches.md"
SIZES = ("small", "large")
FLOAT = 4
MOST = {"forward": 80, "training": 200}  # launches, compiled
FEW = {"forward": 10, "training": 20}
MOST_BYTES = 3
PASSES = {"forward": 2, "training": 5}  # written and read; in backward read, gradients written and read
ROWS = ("eager forward", "eager training", "compiled forward", "compiled training")


class Layer(NamedTuple):
    """A module, and for a size its inputs and how many numbers the algorithm's own tensors have: what comes in and
    goes out, queries, keys, values and what is made of them, and scores."""

    make: Callable[[], nn.Module]
    inputs: Callable[[bool], dict[str, Any]]
    own: Callable[[bool], float]


def sides(large: bool) -> tuple[int, int]:
    """2 images of 16 x 16 pixels, or 32 of 64 x 64."""
    return (32, 64) if large else (2, 16)


def images(make: Callable[[], nn.Module], channels: int, elements: int, inner: int) -> Layer:
    """With ``inner`` numbers for a pixel beside the input's."""
    shape = (channels, elements) if elements > 1 else (channels,)

    def inputs(large: bool) -> dict[str, Any]:
        batch, side = sides(large)
        return {"x": torch.empty(batch, *shape, side, side)}

    def own(large: bool) -> float:
        batch, side = sides(large)
        return batch * side**2 * (channels * elements + inner)

    return Layer(make, inputs, own)


def graphs(large: bool) -> tuple[int, int]:
    """2 graphs of 32 nodes, or 128 of 256."""
    return (128, 256) if large else (2, 32)


PLACES = 21  # of a disk in 5 x 5


def group(kind: str, **options: Any) -> Layer:
    """32 channels of 8 rotations, 8 heads of 4 (lifting from 3 channels), windows of 5 x 5."""
    lifts, heads, elements = kind == "LiftingAttention", 8, 8
    head = {"head_channels": 4, "heads": heads, "kernel_size": 5} | options
    relation = "lifting" if lifts else options.get("relation", "frame")

    def make() -> nn.Module:
        return group_layers.layer(getattr(layers, kind), cyclic(8), 3 if lifts else 32, 32, **head)

    content = 1 if relation == "frame" else heads  # heads that look at content; the others are convolutions
    # of a pixel and a head: scores of places, of output elements, of elements of keys; ge_vit has three such factors
    scores = {"lifting": 1, "frame": 1, "relative": elements, "ge_vit": 3 * elements}[relation] * PLACES * elements
    features = 2 * elements * 16 if kind == "GlobalGroupAttention" else 0  # of queries and of keys
    values = (32 if lifts else 256) + 256 + 256  # values, what is summed of them, output
    numbers = 2 * 4 * (1 if lifts else elements) + scores + features  # queries and keys besides
    return images(make, 3 if lifts else 32, 1 if lifts else 8, values + content * numbers)


MULTIVECTORS = 5 * 8  # of a channel and token of an MLP of one block: embedded, activated, mapped, product, normalised


def tokens(kind: str, irreps: bool = False, **options: Any) -> Layer:
    """Flat batches of clouds, of 32 scalars and 16 vectors, in a module of the core or for e3nn."""
    width = 32 + 3 * 16

    def make() -> nn.Module:
        if not irreps:
            return getattr(layers, kind)(32, 16, **options)
        from tg_equiattn.integrations import e3nn

        return getattr(e3nn, kind)("32x0e + 16x1o", "32x0e + 16x1o", **options)

    def inputs(large: bool) -> dict[str, Any]:
        count, size = graphs(large)
        n = count * size
        batch = torch.arange(count).repeat_interleave(size)
        x = (
            {"x": torch.empty(n, width)}
            if irreps
            else {"scalars": torch.empty(n, 32), "vectors": torch.empty(n, 16, 3)}
        )
        return x | {"pos": torch.empty(n, 3), "batch": batch, "batch_size": count, "max_num_nodes": size}

    def own(large: bool) -> float:
        count, size = graphs(large)
        numbers = 3 + 6 * width  # places, input, queries, keys, values, what is summed of them, output
        if "Ewald" in kind:  # of 2 heads with 8 kernels: scores, two factors of distances, two sums; harmonics
            numbers += size * (2 * (8 + 2 * 8 + 2) + 4)
        else:
            numbers += 2 * 32 * MULTIVECTORS
        if "Vector" in kind:  # scores of a vector channel, and of scalars
            numbers += size * (16 + 1)
        if "Hyena" in kind:  # three spectra at twice the length, and the gate's MLP
            numbers += 3 * 2 * width + 8 * MULTIVECTORS + 48
        return count * size * numbers

    return Layer(make, inputs, own)


def fields(kind: str) -> Layer:
    """The layers for escnn on 8 regular fields of C8."""

    class OfFields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with contextlib.redirect_stdout(io.StringIO()):
                from escnn import gspaces
                from escnn import nn as enn
            from tg_equiattn.integrations import escnn

            space = gspaces.rot2dOnR2(8)
            image, hidden = (enn.FieldType(space, 8 * [r]) for r in (space.trivial_repr, space.regular_repr))
            first = (image,) if "Lifting" in kind else (hidden,)
            options = {} if "Norm" in kind else {"heads": 2, "kernel_size": 5}
            self.wrap = enn.GeometricTensor
            self.layer = getattr(escnn, kind)(*(first if "Norm" in kind else (*first, hidden)), **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.wrap(x, self.layer.in_type)).tensor

    if "Norm" in kind:
        return images(OfFields, 64, 1, 64)
    lifts, content = "Lifting" in kind, 1 if kind == "R2GroupAttention" else 2
    features = 2 * 8 * 16 if "Global" in kind else 0
    numbers = 2 * 4 * (1 if lifts else 8) + PLACES * 8 + features
    return images(OfFields, 8 if lifts else 64, 1, (8 if lifts else 64) + 2 * 64 + content * numbers)


def nodes(make: Callable[[], nn.Module], degree: int = 8) -> Layer:
    """PyG's layout: 64 channels, 8 neighbors."""

    def inputs(large: bool) -> dict[str, Any]:
        count, size = graphs(large)
        n = count * size
        batch = torch.arange(count).repeat_interleave(size)
        first = torch.arange(n).repeat_interleave(degree)
        step = torch.arange(1, degree + 1).repeat(n)
        second = first // size * size + (first + step) % size
        edges = torch.stack([second, first])
        return {"x": torch.empty(n, 64), "edge_index": edges, "edge_offset": torch.zeros(edges.shape[1], 2),
                "batch": batch, "batch_size": count}  # fmt: skip

    def own(large: bool) -> float:
        count, size = graphs(large)
        return count * size * (6 * 64 + 2 * 8 * 64 + 8 * degree)

    return Layer(make, inputs, own)


def pyg(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from tg_equiattn.integrations import pyg

        return getattr(pyg, kind)(64, 64, 8, num_random_features=64, cutoff=3, method="features", **options)

    return make


class Pixels(nn.Module):
    """A Performer layer on a grid."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = layers.PerformerAttention(
            64, 64, 8, num_random_features=64, method="features", cutoff=4, **options
        )
        self.grids = {side: PixelGrid((side, side), 4) for side in (16, 64)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, grid=self.grids[math.isqrt(x.shape[1])])


def pixels(**options: Any) -> Layer:
    def inputs(large: bool) -> dict[str, Any]:
        batch, side = sides(large)
        return {"x": torch.empty(batch, side**2, 64)}

    def own(large: bool) -> float:
        batch, side = sides(large)
        return batch * side**2 * (6 * 64 + 2 * 8 * 64 + (25 * 8 if "offset" not in options else 0))  # features, scores

    return Layer(lambda: Pixels(**options), inputs, own)


LAYERS: dict[str, Layer] = {
    "GroupLinear": images(lambda: layers.GroupLinear(cyclic(8), 32, 32), 32, 8, 256),
    "RegularLayerNorm": images(lambda: layers.RegularLayerNorm(32), 32, 8, 256),
    "RegularGlobalNorm": images(lambda: layers.RegularGlobalNorm(32), 32, 8, 256),
    "GlobalPooling": images(layers.GlobalPooling, 32, 8, 0),
    "GroupAttention": group("GroupAttention"),
    "GroupAttention, relative": group("GroupAttention", relation="relative"),
    "GroupAttention, ge_vit": group("GroupAttention", relation="ge_vit"),
    "LiftingAttention": group("LiftingAttention"),
    "GlobalGroupAttention": group("GlobalGroupAttention", relation="relative", padding_mode="circular"),
    "PerformerAttention, plain": pixels(offset=None),
    "PerformerAttention, window": pixels(),
    "CliffordMLP": Layer(
        lambda: layers.CliffordMLP(16, 16, num_blocks=2),
        lambda large: {"x": torch.empty(32768 if large else 64, 16, 8)},
        lambda large: (32768 if large else 64) * 16 * (2 * 8 + 2 * MULTIVECTORS),
    ),
    "SE3HyenaOperator": tokens("SE3HyenaOperator"),
    "VectorSelfAttention": tokens("VectorSelfAttention"),
    "EwaldAttention": tokens("EwaldAttention", width=1.0, heads=2),
    "R2LiftingAttention": fields("R2LiftingAttention"),
    "R2GroupAttention": fields("R2GroupAttention"),
    "R2GlobalAttention": fields("R2GlobalAttention"),
    "R2RegularLayerNorm": fields("R2RegularLayerNorm"),
    "RelativePerformerConv": nodes(pyg("RelativePerformerConv")),
    "IrrepsSE3HyenaOperator": tokens("IrrepsSE3HyenaOperator", True),
    "IrrepsVectorSelfAttention": tokens("IrrepsVectorSelfAttention", True),
    "IrrepsEwaldAttention": tokens("IrrepsEwaldAttention", True, width=1.0, heads=2),
}


class Cell(NamedTuple):
    """Launches, bytes, the peak of memory if eager, and if compiled how many launches are of libraries."""

    launches: int
    bytes: int
    peak: int = 0
    libraries: int = 0


Cells = dict[str, Cell]


def measured(name: str, large: bool) -> Cells:
    """What one layer asks for at one size."""
    layer = LAYERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = count(layer.make(), layer.inputs(large))
        graphs = compiled(layer.make(), layer.inputs(large))
        sums = [tuple(map(sum, zip(*(g.launches() for g in some), strict=True))) for some in graphs]
    cells = [Cell(c.operations, c.bytes, c.peak) for c in eager]
    cells += [Cell(launches, size, 0, libraries) for launches, size, libraries in sums]
    return dict(zip(ROWS, cells, strict=True))


def met(way: str, eager: Cell, fused: Cell) -> bool:
    """Whether compiled launches are as few as they should be: at most a third of eager ones, or so few that this does
    not matter, or two for each call of a library, which is a launch whatever a compiler does, and two more."""
    return fused.launches <= min(MOST[way], max(eager.launches / 3, FEW[way], 2 * fused.libraries + 2))


def row(name: str, found: dict[str, Cells]) -> str:
    """Of the table: launches eager and compiled at both sizes, bytes at the large one in multiples of its own. What
    misses its goal is in bold."""
    cells = []
    for way in MOST:
        for size in SIZES:
            eager, fused = (found[size][f"{kind} {way}"] for kind in ("eager", "compiled"))
            cells.append(f"{eager.launches:,} / {bold(f'{fused.launches:,}', not met(way, eager, fused))}")
    numbers, large = LAYERS[name].own(True) * FLOAT, found["large"]
    for way in MOST:
        eager, fused = (large[f"{kind} {way}"].bytes / (PASSES[way] * numbers) for kind in ("eager", "compiled"))
        cells.append(f"{eager:.1f} / {bold(f'{fused:.1f}', fused > MOST_BYTES)}")
    cells.append(f"{large['eager training'].peak / 2**30:.2f}")
    return f"| {name} | {' | '.join(cells)} |"


def bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


HEAD = (
    "| layer | forward, small | forward, large | training, small | training, large | bytes, forward | bytes, training "
    "| peak, GiB |\n" + "|---" * 8 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--sizes", nargs="*", default=SIZES, choices=SIZES)
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the table to examples/results, from where make report fills docs/performance.md",
    )
    parser.add_argument("--cells", type=pathlib.Path, default=pathlib.Path("out/launches.json"))
    args = parser.parse_args()
    args.cells.parent.mkdir(exist_ok=True)
    for name, size in itertools.product(args.layers, args.sizes):
        begin = time.process_time()
        found = measured(name, size == "large")
        print(f"{name}, {size}, {time.process_time() - begin:.0f} s: {found}", flush=True)
        kept = json.loads(args.cells.read_text()) if args.cells.exists() else {}
        kept.setdefault(name, {})[size] = found
        args.cells.write_text(json.dumps(kept))
    if args.write:
        kept = json.loads(args.cells.read_text())
        found = {name: {s: {k: Cell(*x) for k, x in c.items()} for s, c in of.items()} for name, of in kept.items()}
        whole = [name for name in LAYERS if set(found.get(name, ())) == set(SIZES)]
        TABLE.write_text("\n".join([HEAD, *(row(name, found[name]) for name in whole)]) + "\n")


if __name__ == "__main__":
    main()
