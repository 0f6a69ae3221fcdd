"""Quick start with e3nn: messages between neighbors on a chain, and SE(3)-Hyena for distant points along it.

One point of each chain, anywhere, has a number, and every point has a vector. The task is each vector times the number.
"""

from pathlib import Path

import torch
from e3nn import o3
from matplotlib.figure import Figure
from tg_equiattn.integrations.e3nn import IrrepsSE3HyenaOperator
from tqdm import trange

hidden, harmonics = o3.Irreps("16x0e + 8x1o"), o3.Irreps("0e + 1o + 2e")


class Model(torch.nn.Module):
    def __init__(self, context):
        super().__init__()
        self.embed = o3.Linear("0e + 1o", hidden)
        self.messages = o3.FullyConnectedTensorProduct(hidden, harmonics, hidden)
        self.context = IrrepsSE3HyenaOperator(hidden, hidden, order="input") if context else None
        self.out = o3.FullyConnectedTensorProduct(hidden, hidden, "1o")

    def forward(self, x, pos, batch):
        near = (batch[1:] == batch[:-1]).nonzero()[:, 0]  # each point but the last of its chain
        source, target = torch.cat([near, near + 1]), torch.cat([near + 1, near])
        direction = o3.spherical_harmonics(harmonics, pos[source] - pos[target], True, "component")
        x = self.embed(x)
        x = x.index_add(0, target, self.messages(x[source], direction) / 2)
        x = x if self.context is None else x + self.context(x, pos, batch)
        return self.out(x, x)


def chains(count, points=20):
    """Numbers and vectors of points, positions on a random walk, the chain of each point, and the answers."""
    number, pos = torch.randn(count, 1, 1), torch.randn(count, points, 3).cumsum(1)
    x, batch = torch.randn(count, points, 4), torch.arange(count).repeat_interleave(points)
    x[..., :1] = torch.zeros(count, points, 1).scatter(1, torch.randint(points, number.shape), number)
    return x.flatten(0, 1), pos.flatten(0, 1), batch, (number * x[..., 1:]).flatten(0, 1)


torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
axis = (figure := Figure(figsize=(7, 7))).subplots()
for name, context in {"messages alone": False, "with SE(3)-Hyena": True}.items():
    torch.manual_seed(0)
    model = Model(context)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=800)
    for _ in trange(800, desc=name, disable=None):
        *chain, target = chains(32)
        optimizer.zero_grad()
        (model(*chain) - target).square().mean().backward()
        optimizer.step()
        schedule.step()
    x, pos, batch, target = chains(500)
    rotation = o3.rand_matrix()
    out = model(x, pos, batch).detach()
    rotated = model(torch.cat([x[:, :1], x[:, 1:] @ rotation.T], 1), pos @ rotation.T, batch).detach()
    error = (rotated - out @ rotation.T).abs().max() / out.abs().max()
    print(f"{name}: mean squared error {(out - target).square().mean():.3f}; equivariance error {error:.0e}")
    axis.plot(target[:, 0], out[:, 0], ".", markersize=2, label=name)
axis.set(title="a perfect model lies on the diagonal", xlim=(-5, 5), ylim=(-5, 5))
axis.set(xlabel="true x component", ylabel="predicted x component")
axis.plot([-5, 5], [-5, 5], color="0.7", zorder=0)
axis.legend()
Path("out").mkdir(exist_ok=True)
figure.savefig("out/quickstart_e3nn.png")
print("figure: out/quickstart_e3nn.png")
