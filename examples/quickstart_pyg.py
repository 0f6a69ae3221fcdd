"""Quick start with PyG: messages and attention in linear time on graphs of bright pixels, at any place.

Attention depends on relative positions only, so translations of a digit change nothing. The same model with positions
among its input features, which is usual, learns the places of the training digits.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tg_equiattn.integrations.pyg import PixelGraph, RelativePerformerConv
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINEConv, global_max_pool
from torch_geometric.transforms import Cartesian, Compose
from tqdm import trange


class Model(torch.nn.Module):
    def __init__(self, position):
        super().__init__()
        self.absolute = position is None
        self.embed = torch.nn.Linear(3 if self.absolute else 1, 32)
        self.messages = GINEConv(MLP([32, 32, 32]), edge_dim=2)
        self.attention = RelativePerformerConv(32, 32, heads=4, position=position, cutoff=4, method="features")
        self.norm, self.head = torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10)

    def forward(self, data, shift=0):
        x = self.embed(torch.cat([data.x, (data.pos + shift) / 8], 1) if self.absolute else data.x)
        x = self.messages(x, data.edge_index, data.edge_attr).relu()
        x = x + self.attention(x, data.edge_index, data.batch, pos=data.pos + shift)
        return self.head(global_max_pool(self.norm(x), data.batch))


torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
transform = Compose([PixelGraph(4), Cartesian(norm=False)])  # offsets of edges in edge_attr, for messages
grids = [transform(Data(image=image, y=y)) for image, y in zip(images, labels, strict=True)]
graphs = [grids[i].subgraph(grids[i].x[:, 0] > 0.2) for i in torch.randperm(len(grids))]
train, test = DataLoader(graphs[:1200], 40, shuffle=True), next(iter(DataLoader(graphs[1200:], 597)))
axis = (figure := Figure(figsize=(8, 5))).subplots()
for name, position in {"positions as features": None, "relative positions": "window"}.items():
    model = Model(position)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=12 * len(train))
    for _ in trange(12, desc=name, disable=None):
        for data in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data), data.y).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        outputs = [model.eval()(test, shift) for shift in range(7)]
    error = (outputs[6] - outputs[0]).abs().max() / outputs[0].abs().max()
    accuracy = [(out.argmax(1) == test.y).float().mean().item() for out in outputs]
    print(f"{name}: {accuracy[0]:.1%} right, {accuracy[6]:.1%} moved by 6 pixels; equivariance error {error:.0e}")
    axis.plot(accuracy, marker="o", label=name)
axis.set(title="relative positions: accuracy does not depend on the place", ylim=(0, 1))
axis.set(xlabel="shift of the test digits in pixels", ylabel="accuracy")
axis.legend()
Path("out").mkdir(exist_ok=True)
figure.savefig("out/quickstart_pyg.png")
print("figure: out/quickstart_pyg.png")
