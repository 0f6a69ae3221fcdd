"""Time and memory of a training step for each node or pixel, of layers at their defaults, from 1,024 nodes on.

One graph, cloud, crystal or image of each size. Every measurement is a process of its own on one thread: the
processor's microseconds for each node of the second step, and the peak memory in KiB for each node, above what was
there before the layer was made. A layer is left out at sizes after one that took longer than --patience.

    OMP_NUM_THREADS=1 python -W ignore examples/benchmarks/scale.py    # half an hour
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable

import torch
from default_cases import HIDDEN, OfTensors, RelativeGPSBlock, RelativePerformerConv, SAGEConv, gspaces, nn
from measure import in_own_process, memory_before, memory_peak, short
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention, IrrepsSE3HyenaOperator, IrrepsVectorSelfAttention
from tg_equiattn.integrations.escnn import R2GlobalAttention, R2GroupAttention, R2LiftingAttention

from tg_equiattn.graphs import neighbor_list

SIZES = [4**n for n in range(5, 10)]
DENSITY = 2.4  # nodes in a cube of side 1
Step = Callable[[], torch.Tensor]


def image(kind: type, pixels: int) -> Step:
    gspace, side = gspaces.rot2dOnR2(4), round(pixels**0.5)
    hidden = nn.FieldType(gspace, 16 * [gspace.regular_repr])
    given = nn.FieldType(gspace, 3 * [gspace.trivial_repr]) if kind is R2LiftingAttention else hidden
    layer, x = OfTensors(kind(given, hidden)), torch.randn(1, given.size, side, side)
    return lambda: layer(x)


def graph(make: Callable[..., torch.nn.Module], nodes: int) -> Step:
    pos = torch.rand(nodes, 3) * (nodes / DENSITY) ** (1 / 3)
    edges, x = neighbor_list(pos, 1.0)[0], torch.randn(nodes, 64)
    layer = make({"pos_dim": 3, "offset": "distance", "cutoff": 1.0})
    return lambda: layer(x, edges, pos=pos)


def cloud(kind: type, nodes: int, crystal: bool = False) -> Step:
    side, ewald = (nodes / DENSITY) ** (1 / 3), kind is IrrepsEwaldAttention
    layer, x = kind(HIDDEN, HIDDEN, **({"width": 1.0} if ewald else {})), HIDDEN.randn(nodes, -1)
    more = {"pos": side * torch.rand(nodes, 3)} if ewald else {}
    more |= {"cell": side * torch.eye(3)} if crystal else {}
    return lambda: layer(x, **more)


LAYERS: dict[str, Callable[[int], Step]] = {
    "R2LiftingAttention, C4": functools.partial(image, R2LiftingAttention),
    "R2GroupAttention, C4": functools.partial(image, R2GroupAttention),
    "R2GlobalAttention, C4": functools.partial(image, R2GlobalAttention),
    "RelativePerformerConv": functools.partial(graph, lambda options: RelativePerformerConv(64, 64, 8, **options)),
    "RelativeGPSBlock": functools.partial(
        graph, lambda options: RelativeGPSBlock(64, SAGEConv(64, 64), 8, attn_kwargs=options)
    ),
    "IrrepsEwaldAttention, crystal": functools.partial(cloud, IrrepsEwaldAttention, crystal=True),
    "IrrepsEwaldAttention, open": functools.partial(cloud, IrrepsEwaldAttention),
    "IrrepsSE3HyenaOperator": functools.partial(cloud, IrrepsSE3HyenaOperator),
    "IrrepsVectorSelfAttention": functools.partial(cloud, IrrepsVectorSelfAttention),
}


def measured(name: str, size: int) -> dict[str, float]:
    """Seconds of the second step, and bytes of both."""
    torch.manual_seed(0)
    before, seconds = memory_before("cpu"), 0.0
    step = LAYERS[name](size)
    for _ in range(2):
        start = time.process_time()
        step().square().sum().backward()
        seconds = time.process_time() - start
    return {"seconds": seconds, "bytes": memory_peak("cpu") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--layers", nargs="*", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--patience", type=float, default=40.0, help="seconds of a step (default 40)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(1)
        print(json.dumps(measured(*json.loads(options.measure))))
        return
    print(f"| layer | {' | '.join(f'{n:,}' for n in options.sizes)} |")
    print("|---" * (1 + len(options.sizes)) + "|")
    for name in options.layers:
        cells, reason = [], ""
        for size in options.sizes:
            found = reason or in_own_process(__file__, name, size)
            if isinstance(found, str):
                cells.append(reason := found)
                continue
            cells.append(f"{short(1e6 * found['seconds'] / size)} / {short(found['bytes'] / 1024 / size)}")
            # at least as long for each node at the next size
            reason = "-" if found["seconds"] > options.patience else ""
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
