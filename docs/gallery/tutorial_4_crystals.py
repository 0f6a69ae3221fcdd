r"""
Energies and forces in periodic cells
=====================================

A whole model of crystals: embedding, Ewald attention with residual connections, an energy for each
atom. It is trained on energies and forces of cells with different numbers of atoms in one batch.
"""

# %%
# Data
# ----
#
# Cells with as many positive as negative charges at random places. Charges are Gaussians of standard
# deviation :math:`\sigma`, so the energy of a cell of volume V is a sum over waves
# that fit into the cell:
#
# .. math:: E = \frac{2\pi}{V} \sum_{k \neq 0} \frac{e^{-\sigma^2 k^2}}{k^2}
#           \Big| \sum_j q_j\, e^{i k \cdot x_j} \Big|^2
#           - \sum_j \frac{q_j^2}{2 \sigma \sqrt\pi}
#
# Every charge acts on every other one and on all periodic images. No cutoff is exact.

import matplotlib.pyplot as plt
import torch
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
SIGMA = 0.7
INTEGERS = torch.cartesian_prod(*[torch.arange(-7.0, 8)] * 3)
INTEGERS = INTEGERS[INTEGERS.norm(dim=1) > 0]


def energy_of(charges, pos, cell):
    k = 2 * torch.pi * INTEGERS @ torch.linalg.inv(cell).T
    square = k.square().sum(1)
    phase = pos @ k.T
    structure = (charges @ phase.cos()).square() + (charges @ phase.sin()).square()
    waves = ((-(SIGMA**2) * square).exp() / square * structure).sum()
    itself = charges.square().sum() / (2 * SIGMA * torch.pi**0.5)
    return 2 * torch.pi / torch.linalg.det(cell).abs() * waves - itself


def crystal(atoms):
    """Charges, positions, cell, energy and forces; each atom has 8 units of volume."""
    cell = torch.eye(3) + 0.1 * torch.randn(3, 3)
    cell = cell * (8 * atoms / torch.linalg.det(cell)) ** (1 / 3)
    pos = (torch.rand(atoms, 3) @ cell).requires_grad_()
    charges = torch.ones(atoms)
    charges[::2] = -1.0
    energy = energy_of(charges, pos, cell)
    (gradient,) = torch.autograd.grad(energy, pos)
    return charges, pos.detach(), cell, energy.detach(), -gradient


# %%
# Several cells are one batch: atoms lie one after the other, ``batch`` says to which cell each belongs,
# and cells are stacked. No padding is needed.


def collate(cells):
    charges, pos, cell, energy, forces = zip(*cells, strict=True)
    batch = torch.arange(len(cells)).repeat_interleave(torch.tensor([len(x) for x in pos]))
    return (
        torch.cat(charges),
        torch.cat(pos),
        batch,
        torch.stack(cell),
        torch.stack(energy),
        torch.cat(forces),
    )


train = [crystal(2 * int(torch.randint(2, 5, ()))) for _ in range(300)]
test = collate([crystal(2 * int(torch.randint(2, 5, ()))) for _ in range(60)])
print("atoms, positions, cells:", *(tuple(x.shape) for x in test[:2]), tuple(test[3].shape))

# %%
# Model
# -----
#
# The embedding is a linear map of the kind of an atom. Each block adds attention and a perceptron to
# the features. The readout gives every atom an energy, and the sum over the atoms of a cell is the
# energy of the cell. Three numbers describe the data, and are the same for all cells:
#
# - ``width``: the width of the narrowest kernel, here about the size of a charge. In a model with
#   messages use half of their cutoff.
# - ``max_width``: the width of the widest kernel, at most half of a cell.
# - ``output_scale``: the size of the sums, here the mean number of atoms. Sums are divided by it
#   and not by the size of each cell, so that energies are extensive.


class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        irreps = f"{channels}x0e"
        settings = {"width": 1.0, "max_width": 2.0, "output_scale": 6, "lmax": 0, "error": 1e-2}
        self.attention = IrrepsEwaldAttention(
            irreps, irreps, num_gaussians=2, num_coulomb=2, **settings
        )
        self.perceptron = torch.nn.Sequential(
            torch.nn.Linear(channels, channels),
            torch.nn.SiLU(),
            torch.nn.Linear(channels, channels),
        )

    def forward(self, x, pos, batch, cell):
        x = x + self.attention(x, pos, batch, cell=cell)
        return x + self.perceptron(x)


class Model(torch.nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.embedding = torch.nn.Linear(2, channels)
        self.blocks = torch.nn.ModuleList(Block(channels) for _ in range(2))
        self.readout = torch.nn.Linear(channels, 1)

    def forward(self, charges, pos, batch, cell):
        kinds = torch.stack([charges > 0, charges < 0], 1)
        x = self.embedding(kinds.to(pos.dtype))
        for block in self.blocks:
            x = block(x, pos, batch, cell)
        atoms = self.readout(x).squeeze(1)
        return torch.zeros(len(cell), dtype=pos.dtype).index_add(0, batch, atoms)


def energies_and_forces(model, charges, pos, batch, cell):
    pos = pos.clone().requires_grad_()
    energy = model(charges, pos, batch, cell)
    (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    return energy, -gradient


# %%
# Training
# --------
#
# The loss is the error of energies per atom and of forces, each relative to its size in the training
# data. The derivative of the forces by the parameters is a second derivative, which every layer has.

everything = collate(train)
sizes = everything[2].bincount()
energy_scale, force_scale = (everything[4] / sizes).std(), everything[5].std()


def errors(model, batch):
    charges, pos, index, cell, true_energy, true_forces = batch
    energy, forces = energies_and_forces(model, charges, pos, index, cell)
    of_energy = (energy - true_energy) / index.bincount() / energy_scale
    of_forces = (forces - true_forces) / force_scale
    return of_energy.square().mean(), of_forces.square().mean()


model = Model()
model.readout.bias.data.fill_((everything[4] / sizes).mean())
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=14 * 15)
for epoch in range(14):
    for chosen in torch.randperm(len(train)).split(20):
        of_energy, of_forces = errors(model, collate([train[i] for i in chosen]))
        optimizer.zero_grad()
        (of_energy + of_forces).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if epoch % 4 == 1:
        print(
            f"epoch {epoch + 1:2}: energies {of_energy.item():.3f}, forces {of_forces.item():.3f}"
        )

of_energy, of_forces = errors(model, test)
print(
    f"unseen cells: energies {of_energy.item():.3f}, forces {of_forces.item():.3f} of the variance"
)

# %%
# What it learned
# ---------------
#
# Left: components of forces in unseen cells. Right: the energy of one unseen cell that is stretched along
# its first lattice vector. The curve is smooth, and its slope is the stress: differentiate the energy
# by a strain of positions and cell together (:doc:`/crystals`).

charges, pos, index, cell, _, true_forces = test
_, forces = energies_and_forces(model, charges, pos, index, cell)
few = index == 0
fractions = pos[few] @ torch.linalg.inv(cell[0])
stretches = torch.linspace(0.85, 1.25, 60)
curves = []
for stretch in stretches:
    stretched = cell[0] * torch.tensor([[stretch], [1.0], [1.0]])
    with torch.no_grad():
        zero = torch.zeros(int(few.sum()), dtype=torch.int64)
        predicted = model(charges[few], fractions @ stretched, zero, stretched[None])
        curves.append([energy_of(charges[few], fractions @ stretched, stretched), predicted.sum()])

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
left.plot([-1, 1], [-1, 1], color="0.7")
left.plot(true_forces.flatten(), forces.detach().flatten(), ".", markersize=3)
bound = 1.1 * float(true_forces.abs().max())
left.set(xlabel="true force", ylabel="predicted force", xlim=(-bound, bound), ylim=(-bound, bound))
for curve, name, line in zip(torch.tensor(curves).T, ("true", "model"), ("-", "--"), strict=True):
    right.plot(stretches, curve, line, label=name)
right.set(xlabel="stretch of the first lattice vector", ylabel="energy of the cell")
right.legend()
plt.show()

# %%
# Symmetry
# --------
#
# Rotate cell and atoms: the energy stays the same, and forces rotate. Repeat the cell: the energy is twice
# as large. Both hold for every value of the parameters, up to ``error`` and rounding.

rotation, _ = torch.linalg.qr(torch.randn(3, 3))
energy, forces = energies_and_forces(model, charges[few], pos[few], index[few], cell[:1])
same, rotated = energies_and_forces(
    model, charges[few], pos[few] @ rotation.T, index[few], cell[:1] @ rotation.T
)
difference = (rotated - forces @ rotation.T).abs().max()
print(f"rotated: energy {(same - energy).abs().item():.0e}, forces {difference:.0e}")

double = cell[:1] * torch.tensor([[2.0], [1.0], [1.0]])
both = torch.cat([pos[few], pos[few] + cell[0, 0]])
twice = model(charges[few].repeat(2), both, index[few].repeat(2), double)
print(f"two cells: {(twice - 2 * energy).abs().item():.0e} from twice the energy")
