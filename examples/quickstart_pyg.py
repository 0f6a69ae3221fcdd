"""Quick start with PyG: every node predicts the offset to the flagged node of its colour, anywhere in its graph.

RelativeGPSBlock stands beside GPSConv, which has the same messages, dense attention and centred positions as inputs.
Both are tested on graphs of the size of training and on graphs with four times the nodes.
"""

from pathlib import Path
from time import process_time

import torch
from matplotlib.figure import Figure
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch.nn.functional import one_hot
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv, GPSConv
from torch_geometric.utils import scatter
from tqdm import trange

ATTENTION = {"offset": "mlp", "values": "offset", "cutoff": 3.0}


def graph(nodes):
    """Nodes at random places, one for each unit of area, of four colours; edges to the six nearest nodes."""
    pos, colour = nodes**0.5 * torch.rand(nodes, 2), torch.randint(4, (nodes,))
    colour[:4] = torch.arange(4)  # the flagged nodes
    near = torch.cdist(pos, pos).fill_diagonal_(torch.inf).topk(6, largest=False).indices
    edges = torch.stack([near.flatten(), torch.arange(nodes).repeat_interleave(6)])
    x = torch.cat([one_hot(colour, 4), torch.arange(nodes)[:, None] < 4], 1).float()
    return Data(x=x, pos=pos, edge_index=edges, edge_attr=pos[edges[0]] - pos[edges[1]], y=pos[colour] - pos)


def block():
    return RelativeGPSBlock(32, GATv2Conv(32, 8, heads=4, edge_dim=2), heads=4, attn_kwargs=ATTENTION)


def rival():
    return GPSConv(32, GATv2Conv(32, 8, heads=4, edge_dim=2), heads=4)


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.relative = layer is block
        self.embed, self.head = torch.nn.Linear(5 if self.relative else 7, 32), torch.nn.Linear(32, 2)
        self.layers = torch.nn.ModuleList([layer(), layer()])

    def forward(self, data):
        x, pos = data.x, {"pos": data.pos} if self.relative else {}
        if not self.relative:
            centred = data.pos - scatter(data.pos, data.batch, reduce="mean")[data.batch]
            x = torch.cat([x, centred / 4], 1)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, data.edge_index, data.batch, edge_attr=data.edge_attr, **pos)
        return 4 * self.head(x)


torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
axes = (figure := Figure(figsize=(11, 5.5), layout="constrained")).subplots(1, 2, sharex=True, sharey=True)
models = {"GPSConv": (rival, 700), "RelativeGPSBlock": (block, 500)}
for (name, (layer, steps)), axis in zip(models.items(), axes, strict=True):
    torch.manual_seed(0)
    model, start = Model(layer), process_time()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    for _ in trange(steps, desc=name, disable=None):
        data = Batch.from_data_list([graph(64) for _ in range(8)])
        optimizer.zero_grad()
        (model(data) - data.y).square().mean().backward()
        optimizer.step()
        schedule.step()
    seconds, errors = process_time() - start, []
    torch.manual_seed(1)
    for nodes in (64, 256):
        data = Batch.from_data_list([graph(nodes) for _ in range(20)])
        with torch.no_grad():
            out = model.eval()(data)
        errors.append(float((out - data.y).square().mean() / data.y.square().mean()))
    print(
        f"{name}: {errors[0]:.2%} of the variance left, {errors[1]:.2%} in graphs with four times the nodes, "
        f"{seconds:.0f} s of training"
    )
    here = data.batch == 0
    axis.scatter(*(data.pos + out)[here].T, s=9, c=data.x[here, :4].argmax(1), cmap="Set1", vmax=8)
    axis.scatter(*data.pos[here][:4].T, s=200, c=torch.arange(4), cmap="Set1", vmax=8, marker="*", edgecolor="black")
    axis.set(title=f"{name}: {errors[1]:.2%} of the variance left", aspect="equal")
figure.suptitle("Where 256 nodes believe the flagged node of their colour to be (dots), and where it is (stars)")
Path("out").mkdir(exist_ok=True)
figure.savefig("out/quickstart_pyg.png")
print("figure: out/quickstart_pyg.png")
