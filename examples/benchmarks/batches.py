"""Does the output of a graph depend on the graphs beside it? Layers and models of PyG, and ours.

    python examples/benchmarks/batches.py

Weights are those of the start, in eval mode and float64. A graph of 100 nodes is alone, beside another graph of 100
nodes, and beside one of 400. The table has the largest change of its outputs, relative to their spread (standard
deviation) over nodes.
"""

import argparse

import torch
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv, GPSConv, SGFormer
from torch_geometric.nn.models import Polynormer

NODES, LARGER, CHANNELS = 100, 400, 32


def graph(nodes):
    pos = nodes**0.5 * torch.rand(nodes, 2)
    near = torch.cdist(pos, pos).fill_diagonal_(torch.inf).topk(6, largest=False).indices
    edges = torch.stack([near.flatten(), torch.arange(nodes).repeat_interleave(6)])
    return Data(x=torch.randn(nodes, CHANNELS), pos=pos, edge_index=edges)


def messages():
    return GATv2Conv(CHANNELS, CHANNELS // 4, heads=4)


def polynormer():
    model = Polynormer(CHANNELS, CHANNELS, CHANNELS)
    model._global = True  # with its attention, which is off at the start
    return model


def block(method):
    attention = {"offset": "mlp", "values": "offset", "cutoff": 3.0, "method": method}
    return RelativeGPSBlock(CHANNELS, messages(), heads=4, attn_kwargs=attention)


LAYERS = {
    "`RelativeGPSBlock`, pairs": lambda: block("pairs"),
    "`RelativeGPSBlock`, features": lambda: block("features"),
    "`GPSConv`, multihead": lambda: GPSConv(CHANNELS, messages(), heads=4),
    "`GPSConv`, Performer": lambda: GPSConv(CHANNELS, messages(), heads=4, attn_type="performer"),
    "`SGFormer`": lambda: SGFormer(CHANNELS, CHANNELS, CHANNELS),
    "`Polynormer`": polynormer,
}


@torch.no_grad()
def change(layer, first, second):
    """Largest change of the first graph's outputs by the second graph, relative to their spread over nodes."""
    found = []
    for graphs in ([first], [first, second]):
        data = Batch.from_data_list(graphs)
        pos = {"pos": data.pos} if isinstance(layer, RelativeGPSBlock) else {}
        found.append(layer(data.x, data.edge_index, data.batch, **pos)[: first.num_nodes])
    return float((found[1] - found[0]).abs().max() / found[0].std(0).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    first, same, larger = graph(NODES), graph(NODES), graph(LARGER)
    print(f"| layer or model | beside {NODES} nodes | beside {LARGER} nodes |\n| --- | --- | --- |")
    for name, make in LAYERS.items():
        layer = make().eval()
        print(f"| {name} | {change(layer, first, same):.0e} | {change(layer, first, larger):.0e} |", flush=True)


if __name__ == "__main__":
    main()
