"""Quick start with e3nn: the electric field at every ion of a cloud, from kinds and places of ions; charges are hidden.

Both models have messages between neighbors. Then comes IrrepsEwaldAttention, or messages between all pairs of ions.
Both are tested on clouds of the size of training and on clouds of eight times the ions.
"""

from pathlib import Path
from time import process_time

import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet
from matplotlib.figure import Figure
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention
from tqdm import trange

HIDDEN, HARMONICS, CHARGES = o3.Irreps("16x0e + 8x1o"), o3.Irreps("0e + 1o"), torch.tensor([1.0, -1.0, 2.0, -2.0])


class Messages(torch.nn.Module):
    """Tensor products of features with harmonics, weighted by a function of the distance, from ions within a cutoff."""

    def __init__(self, cutoff, count):
        super().__init__()
        self.cutoff, self.count = cutoff, count
        self.product = o3.FullyConnectedTensorProduct(HIDDEN, HARMONICS, HIDDEN, shared_weights=False)
        self.radial = FullyConnectedNet([8, 16, self.product.weight_numel], torch.nn.functional.silu)

    def forward(self, x, pos, batch):
        near = (torch.cdist(pos, pos) < self.cutoff) & (batch == batch[:, None])
        target, source = near.fill_diagonal_(False).nonzero().T
        offsets = pos[source] - pos[target]
        lengths = offsets.norm(dim=1, keepdim=True)
        basis = (-(lengths - torch.linspace(0, self.cutoff, 8)).square() / (self.cutoff / 7) ** 2).exp()
        harmonics = o3.spherical_harmonics(HARMONICS, offsets, True, "component")
        messages = self.product(x[source], harmonics, self.radial(2 * basis))
        return torch.zeros_like(x).index_add(0, target, messages) / self.count


class Model(torch.nn.Module):
    def __init__(self, far):
        super().__init__()
        self.embed, self.near, self.far = o3.Linear("4x0e", HIDDEN), Messages(2.0, 2), far
        self.out = o3.Linear(HIDDEN, "1o")

    def forward(self, kinds, pos, batch):
        x = self.embed(kinds)
        x = x + self.near(x, pos, batch)
        return self.out(self.far(x, pos, batch))


def clouds(count, ions):
    """Kinds of ions, random places, one for a unit of volume, clouds, and fields of charges smeared over a length."""
    kind, batch = torch.randint(4, (count, ions)), torch.arange(count).repeat_interleave(ions)
    pos = ions ** (1 / 3) * torch.rand(count, ions, 3)
    offsets = pos[:, :, None] - pos[:, None]  # to ion i from ion j
    field = (CHARGES[kind][:, None, :, None] * offsets / (offsets.square().sum(3, True) + 1) ** 1.5).sum(2)
    return torch.nn.functional.one_hot(kind.flatten(), 4).float(), pos.flatten(0, 1), batch, field.flatten(0, 1)


def ewald():
    return IrrepsEwaldAttention(
        HIDDEN, HIDDEN, width=0.5, max_width=2.0, num_gaussians=2, num_coulomb=2, output_scale=8.0
    )


def all_pairs():
    return Messages(8.0, 8)  # farther than any two ions in training


torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
axes = (figure := Figure(figsize=(10, 5.3), layout="constrained")).subplots(1, 2, sharex=True, sharey=True)
models = {"messages between all pairs": (all_pairs, 100), "Ewald attention": (ewald, 300)}
for (name, (far, steps)), axis in zip(models.items(), axes, strict=True):
    torch.manual_seed(0)
    model, start = Model(far()), process_time()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
    for _ in trange(steps, desc=name, disable=None):
        *cloud, field = clouds(8, 40)
        optimizer.zero_grad()
        (model(*cloud) - field).square().mean().backward()
        optimizer.step()
        schedule.step()
    seconds, errors = process_time() - start, []
    torch.manual_seed(1)
    for count, ions in ((10, 40), (3, 320)):
        kinds, pos, batch, field = clouds(count, ions)
        with torch.no_grad():
            out = model(kinds, pos, batch)
        errors.append(float((out - field).square().mean() / field.square().mean()))
    rotation = o3.rand_matrix()
    with torch.no_grad():
        error = (model(kinds, pos @ rotation.T, batch) - out @ rotation.T).abs().max() / out.abs().max()
    print(
        f"{name}: {errors[0]:.1%} of the variance left, {errors[1]:.1%} in clouds of eight times the ions, "
        f"{seconds:.0f} s of training; equivariance error {error:.0e}"
    )
    axis.plot(field[:, 0], out[:, 0], ".", markersize=3)
    axis.plot([-6, 6], [-6, 6], color="0.7", zorder=0)
    axis.set(title=f"{name}: {errors[1]:.1%} left", xlim=(-6, 6), ylim=(-6, 6), xlabel="field along x")
axes[0].set_ylabel("predicted")
figure.suptitle("Fields in clouds of 320 ions, by models trained on 40")
Path("out").mkdir(exist_ok=True)
figure.savefig("out/quickstart_e3nn.png")
print("figure: out/quickstart_e3nn.png")
