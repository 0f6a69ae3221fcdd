"""A newcomer trains a GPS model on molecules with positions and bonds, after reading these pages and no others."""

import torch
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, global_add_pool

PAGES = ["README.md", "docs/which_layer.md", "docs/graph_settings.md"]

torch.manual_seed(0)


def molecule():
    """A chain of atoms of two kinds; the property is the sum over pairs of unlike atoms of exp(-distance)."""
    atoms = int(torch.randint(5, 12, ()))
    kinds, pos = torch.randint(2, (atoms,)), torch.randn(atoms, 3).cumsum(0)
    chain = torch.arange(atoms - 1)
    bonds = torch.cat([torch.stack([chain, chain + 1]), torch.stack([chain + 1, chain])], 1)
    unlike = kinds[:, None] != kinds
    y = (unlike * (-torch.cdist(pos, pos)).exp()).sum()
    lengths = (pos[bonds[0]] - pos[bonds[1]]).norm(dim=1, keepdim=True)
    x = torch.nn.functional.one_hot(kinds, 2).float()
    return Data(x=x, edge_index=bonds, edge_attr=lengths, pos=pos, y=y)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        attention = {"pos_dim": 3, "offset": "distance", "values": "offset", "cutoff": 3.0, "edge_dim": 1}
        self.embed = torch.nn.Linear(2, 32)
        self.blocks = torch.nn.ModuleList(
            RelativeGPSBlock(32, GATv2Conv(32, 8, heads=4, edge_dim=1), heads=4, attn_kwargs=attention)
            for _ in range(2)
        )
        self.readout = torch.nn.Linear(32, 1)

    def forward(self, data):
        x = self.embed(data.x)
        for block in self.blocks:
            x = block(x, data.edge_index, data.batch, data.edge_attr, data.pos)
        return self.readout(global_add_pool(x, data.batch)).squeeze(1)


molecules = [molecule() for _ in range(240)]
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
LOSSES = []
for _ in range(8):
    for data in DataLoader(molecules[:200], batch_size=20, shuffle=True):
        loss = (model(data) - data.y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        LOSSES.append(loss.item())

model.eval()
data = next(iter(DataLoader(molecules[200:], batch_size=40)))
turn, _ = torch.linalg.qr(torch.randn(3, 3))
with torch.no_grad():
    here = model(data)
    data.pos = data.pos @ turn.T + 5.0
    moved = model(data)
ERROR = ((here - moved).abs().max() / here.abs().max()).item()
