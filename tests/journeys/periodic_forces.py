"""A newcomer trains a model on energies and forces of periodic cells, after reading these pages and no others."""

import torch
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

PAGES = ["README.md", "docs/gallery/tutorial_4_crystals.py"]

torch.manual_seed(0)


def crystal(atoms):
    """Two kinds of atoms in a cubic cell, whose pairs and images attract or repel by Gaussians."""
    side = (8.0 * atoms) ** (1 / 3)
    pos = (side * torch.rand(atoms, 3)).requires_grad_()
    charges = torch.ones(atoms)
    charges[::2] = -1.0
    images = side * torch.cartesian_prod(*[torch.arange(-2.0, 3)] * 3)
    offsets = pos[:, None] - pos + images[:, None, None]  # image, atom, atom
    pairs = (-offsets.square().sum(-1) / 4).exp().sum(0)
    energy = (charges[:, None] * charges * pairs).sum() / 2
    (gradient,) = torch.autograd.grad(energy, pos)
    return charges, pos.detach(), side * torch.eye(3), energy.detach(), -gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        settings = {"width": 1.0, "max_width": 2.0, "avg_num_nodes": 6, "lmax": 0, "error": 1e-2}
        self.embedding = torch.nn.Linear(2, 8)
        self.attention = IrrepsEwaldAttention("8x0e", "8x0e", **settings)
        self.readout = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1))

    def forward(self, charges, pos, batch, cell):
        x = self.embedding(torch.stack([charges > 0, charges < 0], 1).to(pos.dtype))
        x = x + self.attention(x, pos, batch, cell=cell)
        return torch.zeros(len(cell)).index_add(0, batch, self.readout(x).squeeze(1))


def batch_of(cells):
    charges, pos, cell, energy, forces = zip(*cells, strict=True)
    batch = torch.arange(len(cells)).repeat_interleave(torch.tensor([len(x) for x in pos]))
    return torch.cat(charges), torch.cat(pos), batch, torch.stack(cell), torch.stack(energy), torch.cat(forces)


def energies_and_forces(charges, pos, batch, cell):
    pos = pos.clone().requires_grad_()
    energy = model(charges, pos, batch, cell)
    (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    return energy, -gradient


cells = [crystal(atoms) for atoms in (4, 6, 8) for _ in range(20)]
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
LOSSES = []
for _ in range(100):
    *inputs, true_energy, true_forces = batch_of([cells[i] for i in torch.randint(len(cells), (12,))])
    energy, forces = energies_and_forces(*inputs)
    per_atom = (energy - true_energy) / inputs[2].bincount()
    loss = (per_atom.square().mean() + (forces - true_forces).square().mean()) / true_forces.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.item())

charges, pos, batch, cell = batch_of(cells[:3])[:4]
turn, _ = torch.linalg.qr(torch.randn(3, 3))
_, here = energies_and_forces(charges, pos, batch, cell)
_, rotated = energies_and_forces(charges, pos @ turn.T, batch, cell @ turn.T)
ERROR = ((rotated - here @ turn.T).abs().max() / here.abs().max()).item()
