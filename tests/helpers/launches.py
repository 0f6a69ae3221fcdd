"""The table of docs/performance.md of what layers ask of a GPU, counted without one, and what its test recounts.

PYTHONPATH=tests/helpers python tests/helpers/launches.py [LAYER ...] [--write]
"""

from __future__ import annotations

import argparse
import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import group_layers
import torch
from cases import fields_layer
from compiling import compiled
from counting import Cell, count, total
from torch import nn

from tg_equiattn import nn as layers
from tg_equiattn.grids import PixelGrid
from tg_equiattn.groups import cyclic

TABLE = pathlib.Path(__file__).parents[2] / "examples" / "results" / "benchmarks" / "launches.md"
SIZES = ("small", "large")
IMAGES = {"small": (2, 16), "large": (32, 64)}  # how many, and of how many pixels to a side
GRAPHS = {"small": (2, 32), "large": (128, 256)}  # and of how many nodes
FLOAT = 4
MOST = {"forward": 80, "training": 200}  # launches, compiled
FEW = {"forward": 10, "training": 20}
MOST_BYTES = 3
PASSES = {"forward": 2, "training": 5}  # written and read; in backward read, gradients written and read
ROWS = ("eager forward", "eager training", "compiled forward", "compiled training")


class Layer(NamedTuple):
    """A module, its inputs for a size, and how many numbers the algorithm's own tensors have for a pixel or node, or
    for one of a graph of so many: what comes in and goes out, queries, keys, values and what is made of them, and
    scores."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    numbers: Callable[[int], float]
    sizes: dict[str, tuple[int, int]] = GRAPHS

    def given(self, size: str) -> dict[str, Any]:
        return self.inputs(*self.sizes[size])

    def own(self) -> float:
        """Bytes of the algorithm's own tensors at the large size."""
        count, size = self.sizes["large"]
        return FLOAT * count * (size**2 if self.sizes is IMAGES else size) * self.numbers(size)


def images(make: Callable[[], nn.Module], channels: int, elements: int, inner: int) -> Layer:
    """With ``inner`` numbers for a pixel beside the input's."""
    shape = (channels, elements) if elements > 1 else (channels,)
    inputs = lambda batch, side: {"x": torch.empty(batch, *shape, side, side)}  # noqa: E731
    return Layer(make, inputs, lambda _: channels * elements + inner, IMAGES)


PLACES = 21  # of a disk in 5 x 5


def group(kind: str, **options: Any) -> Layer:
    """32 channels of 8 rotations, 8 heads of 4 (lifting from 3 channels), windows of 5 x 5."""
    lifts, heads, elements = kind == "LiftingAttention", 8, 8
    head = {"head_channels": 4, "heads": heads, "kernel_size": 5} | options
    relation = "lifting" if lifts else options.get("relation", "frame")
    make = lambda: group_layers.layer(getattr(layers, kind), cyclic(8), 3 if lifts else 32, 32, **head)  # noqa: E731
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

    def inputs(count: int, size: int) -> dict[str, Any]:
        n = count * size
        batch = torch.arange(count).repeat_interleave(size)
        x = {"x": torch.empty(n, width)}
        x = x if irreps else {"scalars": torch.empty(n, 32), "vectors": torch.empty(n, 16, 3)}
        return x | {"pos": torch.empty(n, 3), "batch": batch, "batch_size": count, "max_num_nodes": size}

    def numbers(size: int) -> float:
        found = 3 + 6 * width  # places, input, queries, keys, values, what is summed of them, output
        if "Ewald" in kind:  # of 2 heads with 8 kernels: scores, two factors of distances, two sums; harmonics
            found += size * (2 * (8 + 2 * 8 + 2) + 4)
        else:
            found += 2 * 32 * MULTIVECTORS
        if "Vector" in kind:  # scores of a vector channel, and of scalars
            found += size * (16 + 1)
        if "Hyena" in kind:  # three spectra at twice the length, and the gate's MLP
            found += 3 * 2 * width + 8 * MULTIVECTORS + 48
        return found

    return Layer(make, inputs, numbers)


def fields(kind: str) -> Layer:
    """The layers for escnn on 8 regular fields of C8."""
    make = lambda: fields_layer(kind, "rot2dOnR2", (8,), 8, heads=2, kernel_size=5)  # noqa: E731
    if "Norm" in kind:
        return images(make, 64, 1, 64)
    lifts, content = "Lifting" in kind, 1 if kind == "R2GroupAttention" else 2
    features = 2 * 8 * 16 if "Global" in kind else 0
    numbers = 2 * 4 * (1 if lifts else 8) + PLACES * 8 + features
    return images(make, 8 if lifts else 64, 1, (8 if lifts else 64) + 2 * 64 + content * numbers)


def pyg(kind: str, degree: int = 8) -> Layer:
    """PyG's layout: 64 channels, 8 neighbors."""

    def make() -> nn.Module:
        from tg_equiattn.integrations import pyg

        return getattr(pyg, kind)(64, 64, 8, num_random_features=64, cutoff=3, method="features")

    def inputs(count: int, size: int) -> dict[str, Any]:
        n = count * size
        first = torch.arange(n).repeat_interleave(degree)
        step = torch.arange(1, degree + 1).repeat(n)
        edges = torch.stack([first // size * size + (first + step) % size, first])
        return {"x": torch.empty(n, 64), "edge_index": edges, "edge_offset": torch.zeros(n * degree, 2),
                "batch": torch.arange(count).repeat_interleave(size), "batch_size": count}  # fmt: skip

    return Layer(make, inputs, lambda _: 6 * 64 + 2 * 8 * 64 + 8 * degree)


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


def pixels(**options: Any) -> Layer:
    numbers = 6 * 64 + 2 * 8 * 64 + (25 * 8 if "offset" not in options else 0)  # features, scores
    inputs = lambda batch, side: {"x": torch.empty(batch, side**2, 64)}  # noqa: E731
    return Layer(lambda: Pixels(**options), inputs, lambda _: numbers, IMAGES)


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
    "PerformerAttention, plain": pixels(position=None),
    "PerformerAttention, window": pixels(),
    "CliffordMLP": Layer(
        lambda: layers.CliffordMLP(16, 16, num_blocks=2),
        lambda count, size: {"x": torch.empty(count * size, 16, 8)},
        lambda _: 16 * (2 * 8 + 2 * MULTIVECTORS),
    ),
    "SE3HyenaOperator": tokens("SE3HyenaOperator"),
    "VectorSelfAttention": tokens("VectorSelfAttention"),
    "EwaldAttention": tokens("EwaldAttention", width=1.0, heads=2),
    "R2LiftingAttention": fields("R2LiftingAttention"),
    "R2GroupAttention": fields("R2GroupAttention"),
    "R2GlobalAttention": fields("R2GlobalAttention"),
    "R2RegularLayerNorm": fields("R2RegularLayerNorm"),
    "RelativePerformerConv": pyg("RelativePerformerConv"),
    "IrrepsSE3HyenaOperator": tokens("IrrepsSE3HyenaOperator", True),
    "IrrepsVectorSelfAttention": tokens("IrrepsVectorSelfAttention", True),
    "IrrepsEwaldAttention": tokens("IrrepsEwaldAttention", True, width=1.0, heads=2),
}


def measured(name: str, size: str) -> dict[str, Cell]:
    """What one layer asks for at one size."""
    layer = LAYERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = count(layer.make(), layer.given(size))
        graphs = compiled(layer.make(), layer.given(size))
    cells = [c.cell() for c in eager] + [total(graph.launches() for graph in some) for some in graphs]
    return dict(zip(ROWS, cells, strict=True))


def met(way: str, eager: Cell, fused: Cell) -> bool:
    """Whether compiled launches are as few as they should be: at most a third of eager ones, or so few that this does
    not matter, or two for each call of a library, which is a launch whatever a compiler does, and two more."""
    return fused.launches <= min(MOST[way], max(eager.launches / 3, FEW[way], 2 * fused.libraries + 2))


def row(name: str, found: dict[str, dict[str, Cell]]) -> str:
    """Of the table: launches eager and compiled at both sizes, bytes at the large one in multiples of its own. What
    misses its goal is in bold."""
    cells = []
    for way in MOST:
        for size in SIZES:
            eager, fused = (found[size][f"{kind} {way}"] for kind in ("eager", "compiled"))
            cells.append(f"{eager.launches:,} / {bold(f'{fused.launches:,}', not met(way, eager, fused))}")
    own, large = LAYERS[name].own(), found["large"]
    for way in MOST:
        eager, fused = (large[f"{kind} {way}"].bytes / (PASSES[way] * own) for kind in ("eager", "compiled"))
        cells.append(f"{eager:.1f} / {bold(f'{fused:.1f}', fused > MOST_BYTES)}")
    cells.append(f"{large['eager training'].peak / 2**30:.2f}")
    return f"| {name} | {' | '.join(cells)} |"


def bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def table() -> tuple[list[str], dict[str, str]]:
    """The head of the table, and its rows by their layer."""
    lines = TABLE.read_text().splitlines()
    return lines[:2], {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", nargs="*", default=list(LAYERS), metavar="LAYER")
    parser.add_argument("--write", action="store_true", help="to examples/results, which make report reads")
    args = parser.parse_args()
    head, rows = table()
    for name in args.layers:
        rows[name] = row(name, {size: measured(name, size) for size in SIZES})
        print(rows[name], flush=True)
        if args.write:
            TABLE.write_text("\n".join([*head, *(rows[name] for name in LAYERS if name in rows)]) + "\n")


if __name__ == "__main__":
    main()
