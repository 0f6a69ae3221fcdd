"""Draw docs/_static/attends_*.png: who attends to whom, a picture for each family. Takes no arguments."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.patches import Polygon, Rectangle

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import LiftingAttention

STATIC = Path(__file__).parent / "_static"
QUERY, NEAR, FAR = "tab:red", "tab:blue", "tab:orange"
plt.rcParams.update({"font.size": 11, "axes.titlesize": 11})


def save(figure, name: str) -> None:
    figure.savefig(STATIC / f"attends_{name}.png", dpi=110)
    plt.close(figure)


def bare(axis, title: str = "") -> None:
    axis.set(xticks=[], yticks=[], title=title)


@torch.no_grad()
def pixel_weights(image: torch.Tensor, pixel: tuple[int, int]) -> torch.Tensor:
    """Weights (group element, *key pixel) of a pixel in a head that prefers the pixel to the right, in its frame."""
    layer = LiftingAttention(
        cyclic(4), 1, 1, heads=1, head_channels=1, encoding="joint", locality=0.5
    )
    for linear in (layer.query, layer.key):  # bright pixels look for bright ones
        linear.weight.fill_(2.0)
        linear.bias.fill_(-1.0)
    for parameter in layer.encoding.parameters():  # scores depend on positions by locality alone
        parameter.zero_()
    layer.locality.centre.copy_(torch.tensor([[1.0, 0.0]]))
    return layer.attention_map(image[None, None], pixel)[0, 0, :, 0, 0]


def pixels() -> None:
    side, (row, column) = 9, (4, 4)
    image = torch.zeros(side, side)
    image[2:7, 4] = 1.0
    image[2, 4:7] = image[4, 4:6] = 1.0  # an F
    figure, axes = plt.subplots(2, 5, figsize=(8, 3.9), layout="constrained")
    for line, (name, picture) in zip(
        axes, {"image": image, "image, rotated": image.rot90()}.items(), strict=True
    ):
        line[0].imshow(picture, cmap="gray", vmin=0, vmax=1.3)
        bare(line[0], name)
        weights = pixel_weights(picture, (row, column))
        for h, axis in enumerate(line[1:]):
            axis.imshow(weights[h], cmap="Blues", vmin=0, vmax=float(weights.max()))
            bare(axis, f"h = {90 * h}°")
        for side_of_frame in line[1 if name == "image" else 2].spines.values():
            side_of_frame.set(color=FAR, linewidth=3)
        for axis in line:
            axis.add_patch(
                Rectangle(
                    (column - 2.5, row - 2.5), 5, 5, fill=False, edgecolor=NEAR, linewidth=1.5
                )
            )
            axis.plot(column, row, "o", color=QUERY, markersize=5)
    figure.suptitle(
        "Weights of the pixel under the red dot, in the frame of each rotation h", fontsize=11
    )
    save(figure, "pixels")


def graph() -> None:
    generator = torch.Generator().manual_seed(4)
    pos = 1 + 9 * torch.rand(75, 2, generator=generator)
    distance = torch.cdist(pos, pos) + 10 * torch.eye(75)
    pos = pos[distance.min(1).values > 0.55]  # no two nodes lie on each other
    content = torch.rand(len(pos), generator=generator)
    query = int((pos - torch.tensor([4.0, 4.8])).norm(dim=1).argmin())
    near = ((pos - pos[query]).norm(dim=1) < 2.6).nonzero()[:, 0]
    figure, axes = plt.subplots(
        1, 2, figsize=(8, 3.8), layout="constrained", sharex=True, sharey=True
    )
    moves = {"graph": torch.zeros(2), "graph, moved: the same weights": torch.tensor([4.0, 2.5])}
    for axis, (title, shift) in zip(axes, moves.items(), strict=True):
        nodes = pos + shift
        for node in range(len(nodes)):
            axis.plot(*nodes[[query, node]].T, color="0.85", linewidth=0.7, zorder=1)
        far = torch.ones(len(nodes), dtype=torch.bool).index_fill(0, near, False)
        size = 15 + 60 * content[far]
        axis.scatter(
            *nodes[far].T, s=size, color=FAR, label="distant node: weight by content", zorder=3
        )
        for node in near:
            axis.plot(*nodes[[query, int(node)]].T, color=NEAR, linewidth=2, zorder=2)
        axis.scatter(
            *nodes[near].T, s=55, color=NEAR, label="near pair: content and offset", zorder=4
        )
        axis.scatter(*nodes[query], s=90, color=QUERY, label="query", zorder=5)
        axis.plot(0, 0, "+", color="black", markersize=11, label="origin")
        bare(axis, title)
        axis.set(xlim=(-1, 15), ylim=(-1, 13.5), aspect="equal")
    handles, labels = axes[0].get_legend_handles_labels()
    order = [2, 1, 0, 3]
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside lower center", ncols=2
    )
    save(figure, "graph")


def cell() -> None:
    vectors = torch.tensor([[4.0, 0.0], [1.2, 3.4]])
    atoms = torch.tensor([[0.2, 0.25], [0.7, 0.35], [0.4, 0.75]]) @ vectors
    shifts = torch.cartesian_prod(torch.arange(-1.0, 3), torch.arange(-1.0, 3)) @ vectors
    corners = torch.stack([torch.zeros(2), vectors[0], vectors.sum(0), vectors[1]])
    x, y = torch.meshgrid(torch.linspace(-3, 8, 300), torch.linspace(-2.2, 5.8, 220), indexing="xy")
    points = torch.stack([x, y], -1)
    kernel = (-(points - atoms[0]).square().sum(-1) / (2 * 1.5**2)).exp()
    wave = (2 * torch.pi * points @ torch.linalg.inv(vectors) @ torch.tensor([2.0, 1.0])).cos()
    figure, axes = plt.subplots(
        1, 2, figsize=(8, 3.7), layout="constrained", sharex=True, sharey=True
    )
    shown = {
        "pairs: a kernel of the distance": (kernel, "Reds", 0),
        "waves: one wave of the cell": (wave, "coolwarm", -1),
    }
    for axis, (title, (field, colours, low)) in zip(axes, shown.items(), strict=True):
        axis.contourf(
            x, y, field, torch.linspace(low, 1, 13), cmap=colours, alpha=0.6, extend="both"
        )
        images = (atoms + shifts[:, None]).flatten(0, 1)
        axis.scatter(*images.T, s=28, facecolor="white", edgecolor="0.35", label="image of an atom")
        axis.scatter(*atoms.T, s=60, color=NEAR, edgecolor="white", label="atom in the cell")
        axis.scatter(*atoms[0], s=90, color=QUERY, edgecolor="white", label="query")
        axis.add_patch(Polygon(corners, fill=False, edgecolor="black", linewidth=1.6))
        bare(axis, title)
        axis.set(xlim=(-3, 8), ylim=(-2.2, 5.8), aspect="equal")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, "cell")


def chain() -> None:
    tokens, query = 24, 9
    turn = torch.linspace(0.4, 2.6 * torch.pi, tokens)
    fold = torch.stack([(1 + 0.06 * turn) * turn.cos() + 0.25 * turn, 1.2 * turn.sin()], 1)
    lag = query - torch.arange(tokens)
    strength = (1 + lag.abs()) ** -0.6 * torch.cos(0.55 * lag)
    figure, (space, order) = plt.subplots(
        1, 2, figsize=(8, 3.6), layout="constrained", width_ratios=(1, 1.25)
    )
    options = {
        "c": strength,
        "cmap": "coolwarm",
        "vmin": -1,
        "vmax": 1,
        "edgecolor": "0.4",
        "zorder": 2,
    }
    space.plot(*fold.T, color="0.7", zorder=1)
    space.scatter(*fold.T, s=70, **options)
    order.vlines(torch.arange(tokens), 0, strength, color="0.7", zorder=1)
    order.axhline(0, color="0.7", linewidth=1)
    order.scatter(torch.arange(tokens), strength, s=55, **options)
    for axis, place in ((space, fold[query]), (order, (query, 1.0))):
        axis.scatter(
            *place, s=170, facecolor="none", edgecolor=QUERY, linewidth=2, zorder=3, label="query i"
        )
    bare(space, "a chain folded in space")
    space.set_aspect("equal")
    space.legend(loc="center")
    order.set(
        title="its filter along the chain",
        xlabel="token j",
        ylabel="filter h(i - j)",
        ylim=(-0.6, 1.15),
    )
    save(figure, "chain")


if __name__ == "__main__":
    for picture in (pixels, graph, cell, chain):
        picture()
