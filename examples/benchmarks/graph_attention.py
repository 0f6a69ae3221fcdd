"""Time and peak memory of attention over whole graphs, of PyTorch Geometric's layers and of ours, in PyG's own layout.

Three loads: 128 graphs of 20 to 40 nodes (molecules), one graph of 100,000 nodes and one of 1,000,000. Nodes lie evenly
in space, joined where nearer than a distance that makes about eight neighbors. Layers of 64 channels and 4 heads:

TransformerConv     attention along edges only, no global context
dense               torch's MultiheadAttention on a padded batch, as GPSConv(attn_type="multihead"); small graphs
PyG Performer       of as many heads and channels as ours, on a padded batch
PyG Performer, defaults     as GPSConv(attn_type="performer") makes it: 4 heads of 64
None                RelativePerformerConv without positions, method="features" here and in the next ones
far offsets         the same with values="offset": offsets of all nodes, without near pairs
mlp, distance       near pairs besides, shared among layers, as RelativeGPSBlock has them
mlp, edges          the same from the edges, which are checked and sorted in every call
mlp + values, distance + values     with values="offset": offsets of near pairs and of all nodes
distance + far      with values="far": near pairs, and offsets of all nodes
pairs ...           the same with method="pairs"; small graphs only

Ours and PyG's Performer have equal numbers of random features.

Peak memory, forward and backward, is measured in a process for each layer; times in one for all layers of a load, which
take turns after a warm-up, medians. In brackets: as a multiple of the quickest of dense attention and PyG's Performer.

    python examples/benchmarks/graph_attention.py                         # some minutes
    python examples/benchmarks/graph_attention.py --loads molecules
    python examples/benchmarks/graph_attention.py --device cuda
    python examples/benchmarks/graph_attention.py --crossover             # pairs and features by the size of graphs

``--crossover`` measures when all pairs of a graph take as long as random features do, forward and backward, and how far
off features are in a new layer, of 1,000 nodes: the root mean square error of its outputs, as a share of how much
outputs of nodes differ, in the mean of 16 draws.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable

import torch
from measure import (
    DIRECTIONS,
    add_arguments,
    cell,
    in_own_process,
    in_turn,
    machine,
    measure,
    report,
    short,
    step,
    table,
)
from tg_equiattn.integrations.pyg import RelativePerformerConv
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.attention import PerformerAttention
from torch_geometric.utils import to_dense_batch
from tqdm import tqdm

from tg_equiattn.graphs import neighbor_list

CHANNELS, HEADS, NEIGHBORS, FEATURES = 64, 4, 8, 44  # PyG's number for this width
LOADS = {"molecules": (128, 30), "100,000": (1, 100_000), "1,000,000": (1, 1_000_000)}
OURS = {
    "None": {"position": None},
    "far offsets": {"position": None, "values": "offset"},
    "mlp": {"offset": "mlp"},
    "mlp, edges": {"offset": "mlp"},
    "distance": {"offset": "distance"},
    "mlp + values": {"offset": "mlp", "values": "offset"},
    "distance + far": {"offset": "distance", "values": "far"},
    "distance + values": {"offset": "distance", "values": "offset"},
}
OF_PAIRS = ("None", "far offsets", "mlp", "distance", "distance + far", "distance + values")
PAIRS = {f"pairs, {name}": {**OURS[name], "method": "pairs"} for name in OF_PAIRS}
PEERS = {"PyG Performer": {"head_channels": CHANNELS // HEADS}, "PyG Performer, defaults": {}}
VARIANTS = ("TransformerConv", "dense", *PEERS, *OURS, *PAIRS)
SMALL = ("dense", *PAIRS)


class Dense(nn.Module):
    """A layer of padded batches (B, N, C) with a mask, on nodes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        x, mask = to_dense_batch(x, batch)
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, key_padding_mask=~mask, need_weights=False)[0][mask]
        return self.layer(x, mask=mask)[mask]


def graphs(load: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, positions, sorted graph index and edges."""
    count, nodes = LOADS[load]
    sizes = torch.randint(2 * nodes // 3, 4 * nodes // 3 + 1, (count,)) if count > 1 else torch.tensor([nodes])
    batch = torch.arange(count).repeat_interleave(sizes)
    side = (sizes.double() ** (1 / 3))[batch, None].float()  # one node in a unit of volume
    pos = torch.rand(len(batch), 3) * side
    edges = neighbor_list(pos, cutoff(), batch=batch)[0]
    return torch.randn(len(batch), CHANNELS).to(device), pos.to(device), batch.to(device), edges.to(device)


def cutoff() -> float:
    """The radius of a ball of so many nodes as are neighbors."""
    return (3 * NEIGHBORS / (4 * torch.pi)) ** (1 / 3)


def prepare(variant: str, load: str, device: str):
    """A layer and a call of it."""
    x, pos, batch, edges = graphs(load, device)
    count = LOADS[load][0]
    if variant == "TransformerConv":
        layer = TransformerConv(CHANNELS, CHANNELS // HEADS, HEADS).to(device)
        return layer, lambda: layer(x, edges)
    if variant == "dense" or variant in PEERS:
        dense = nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True)
        layer = Dense(dense if variant == "dense" else PerformerAttention(CHANNELS, HEADS, **PEERS[variant])).to(device)
        return layer, lambda: layer(x, batch)
    options = {"pos_dim": 3, "cutoff": cutoff(), "num_random_features": FEATURES, "method": "features"}
    layer = RelativePerformerConv(CHANNELS, CHANNELS, HEADS, **options | (OURS | PAIRS)[variant]).to(device)
    if variant.endswith("edges"):
        return layer, lambda: layer(x, edges, batch, pos=pos)
    near = layer.neighbors(edges, batch, pos=pos, num_nodes=len(x))
    return layer, lambda: layer(x, batch=batch, pos=pos, batch_size=count, neighbors=near)


def memory(variant: str, load: str, device: str) -> dict:
    """Of one layer, forward and backward."""
    torch.manual_seed(0)
    prepare(variant, "molecules", device)[1]().sum().backward()  # what libraries load at the first call
    return measure(lambda: prepare(variant, load, device), True, 1, 1, device)


def seconds(variants: list[str], load: str, direction: str, repeats: int, device: str) -> list[float]:
    """Of several layers, in turn."""
    calls = []
    for variant in variants:
        torch.manual_seed(0)
        calls.append(step(*prepare(variant, load, device), direction == DIRECTIONS[1]))
    return in_turn(calls, repeats, 1, device)


def crossover_calls(name: str, nodes: int, features: int, backward: bool, device: str) -> dict[str, Callable[[], None]]:
    """One of ``OURS`` by pairs and by features, of graphs of so many nodes, some 8,000 together."""
    count = max(1, 8192 // nodes)
    batch = torch.arange(count, device=device).repeat_interleave(nodes)
    x, pos = torch.randn(len(batch), CHANNELS, device=device), torch.rand(len(batch), 3) * nodes ** (1 / 3)
    edges = neighbor_list(pos, cutoff(), batch=batch.cpu())[0].to(device)
    pos, calls = pos.to(device), {}
    for method in ("pairs", "features"):
        options = {"pos_dim": 3, "cutoff": cutoff(), "num_random_features": features, "method": method}
        layer = RelativePerformerConv(CHANNELS, CHANNELS, HEADS, **options | OURS[name]).to(device)
        near = layer.neighbors(edges, batch, pos=pos, num_nodes=len(x))

        def call(layer=layer, near=near) -> Tensor:
            return layer(x, batch=batch, pos=pos, batch_size=count, neighbors=near)

        calls[method] = step(layer, call, backward)
    return calls


def crossover(nodes: int, features: int, repeats: int, device: str) -> list[float]:
    """Seconds by pairs and by features, forward and backward: with far offsets alone, and with near pairs besides."""
    calls = []
    for name in ("far offsets", "distance + values"):
        calls += crossover_calls(name, nodes, features, True, device).values()
    return in_turn(calls, repeats, 1, device)


@torch.no_grad()
def error(name: str, features: int, nodes: int = 1000, draws: int = 16) -> float:
    """Of a new layer's outputs, by so many features."""
    pos, x, found = torch.rand(nodes, 3) * nodes ** (1 / 3), torch.randn(nodes, CHANNELS), []
    edges = neighbor_list(pos, cutoff())[0]
    options = {"pos_dim": 3, "cutoff": cutoff(), "num_random_features": features, "key_channels": 3, **OURS[name]}
    for _ in range(draws):
        layers = [RelativePerformerConv(CHANNELS, CHANNELS, HEADS, **options, method=m) for m in ("pairs", "features")]
        weights = {name: x for name, x in layers[0].state_dict().items() if "_extra_state" not in name}
        layers[1].load_state_dict(weights, strict=False)  # the settings differ in the method
        exact, estimate = (layer(x, edges, torch.zeros(nodes, dtype=torch.long), pos=pos) for layer in layers)
        found.append(float(((estimate - exact).square().mean() / (exact - exact.mean(0)).square().mean()).sqrt()))
    return sum(found) / draws


def crossovers(options: argparse.Namespace) -> None:
    """The table of ``--crossover``."""
    counts, sizes = (32, 64, 128), (32, 64, 96, 128, 192, 256, 512)
    rows = ["time by pairs as a multiple of that by random features, far offsets alone / near pairs besides:", ""]
    rows += table(["nodes of a graph", *(f"{m} features" for m in counts)])
    for nodes in tqdm(sizes, desc="sizes", disable=None):
        cells = []
        for m in counts:
            times = crossover(nodes, m, options.repeats, options.device)
            cells.append(f"{times[0] / times[1]:.2f} / {times[2] / times[3]:.2f}")
        rows.append(f"| {nodes} | {' | '.join(cells)} |")
    rows += ["", f"error of features in a new layer, heads of {CHANNELS // HEADS}:", ""]
    rows += table(["features", "without near pairs", "with near pairs"])
    torch.manual_seed(0)
    for m in (16, 32, 64, 128, 256, 512):
        off = (f"{100 * error(name, m):.0f} %" for name in ("None", "distance + values"))
        rows.append(f"| {m} | {' | '.join(off)} |")
    report(machine(options.device), rows, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--crossover", action="store_true")
    add_arguments(parser, "out/benchmarks/graph_attention.md")
    options = parser.parse_args()
    if options.measure:
        what, *arguments = json.loads(options.measure)
        print(json.dumps({"memory": memory, "seconds": seconds}[what](*arguments)))
        return
    if options.crossover:
        crossovers(options)
        return

    rows = []
    for load, direction in tqdm(list(itertools.product(options.loads, DIRECTIONS)), disable=None):
        variants = [v for v in options.variants if load == "molecules" or v not in SMALL]
        times = in_own_process(__file__, "seconds", variants, load, direction, options.repeats, options.device)
        times = dict.fromkeys(variants, times) if isinstance(times, str) else dict(zip(variants, times, strict=True))
        peers = [times[v] for v in ("dense", "PyG Performer") if isinstance(times.get(v), float)]
        nodes = "128 graphs of 30 nodes" if load == "molecules" else f"{load} nodes"
        backward = direction == DIRECTIONS[1]
        rows += ["", f"{nodes}, {direction}:", "", *table(["layer", "ms", *["GiB"] * backward])]
        for variant in variants:
            cells = [variant, milliseconds(times[variant], peers)]
            if backward:
                cells.append(cell(in_own_process(__file__, "memory", variant, load, options.device), "", "bytes"))
            rows.append(f"| {' | '.join(cells)} |")
    note = (
        f"{HEADS} heads of {CHANNELS // HEADS}, whole layers with projections, about {NEIGHBORS} neighbors a node; "
        f"{machine(options.device)}. In brackets: as a multiple of the quickest of dense attention and PyG's Performer."
    )
    report(note, rows, options.output)


def milliseconds(value: float | str, peers: list[float]) -> str:
    """A time, and as a multiple of the quickest peer's."""
    if isinstance(value, str):
        return value
    text = short(1000 * value)
    return f"{text} ({value / min(peers):.2f})" if peers else text


if __name__ == "__main__":
    main()
