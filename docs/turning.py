"""Draw docs/_static/turning.png: feature maps of two trained models, of a digit and of the digit rotated.

Both models are trained to read upright digits. Nothing else differs than group attention in place of convolutions.
"""

from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GlobalPooling, GroupAttention, LiftingAttention, RegularLayerNorm

CHANNELS, EPOCHS, DIGIT, BORDER = 12, 12, 1404, 4


def bodies() -> dict[str, nn.Module]:
    """Models from images to feature maps (B, CHANNELS, H, W) of the same size."""
    group = cyclic(4)
    attention = nn.Sequential(
        LiftingAttention(group, 1, CHANNELS, heads=9, kernel_size=3),
        RegularLayerNorm(CHANNELS),
        nn.ReLU(),
        GroupAttention(group, CHANNELS, CHANNELS, heads=9, kernel_size=5),
        GlobalPooling(space=None, group="max"),
    )
    convolution = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.GroupNorm(1, CHANNELS),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2),
    )
    return {"group attention": attention, "convolution": convolution}


def read(head: nn.Module, maps: torch.Tensor) -> torch.Tensor:
    return head(torch.cat([maps.amax((2, 3)), maps.mean((2, 3))], 1))


def trained(body: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train on the first 1,400 digits; the linear map behind the pooling is returned."""
    head = nn.Linear(2 * CHANNELS, 10)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=EPOCHS * 35)
    for _ in range(EPOCHS):
        for batch in torch.randperm(1400).split(40):
            optimizer.zero_grad()
            F.cross_entropy(read(head, body(images[batch])), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return head


def percent_right(
    body: nn.Module, head: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> float:
    return 100 * float((read(head, body(images)).argmax(1) == labels).float().mean())


def show(line, digit: torch.Tensor, body: nn.Module) -> None:
    upright, rotated = body(digit)[0], body(digit.rot90(1, (2, 3)))[0]
    channel = int(upright.flatten(1).std(1).argmax())
    error = (rotated - upright.rot90(1, (1, 2)))[channel].abs() / upright[channel].abs().max()
    low, high = float(upright[channel].min()), float(upright[channel].max())
    difference = f"{error.max():.0e}" if error.max() < 1e-3 else f"{error.max():.2f}"
    shown = [
        (digit[0, 0], "digit", {"cmap": "gray"}),
        (upright[channel], "its feature map", {"vmin": low, "vmax": high}),
        (digit[0, 0].rot90(1), "digit, rotated", {"cmap": "gray"}),
        (rotated[channel], "its feature map", {"vmin": low, "vmax": high}),
        (error, f"largest error: {difference}", {"vmin": 0, "vmax": 0.5, "cmap": "magma"}),
    ]
    inside = slice(BORDER, -BORDER)  # without the pixels whose windows end at the border
    for axis, (picture, title, options) in zip(line, shown, strict=True):
        axis.imshow(picture[inside, inside], **options)
        axis.set_title(title, fontsize=11)
        axis.set(xticks=[], yticks=[])


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    images = F.pad(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, [1] * 4)
    labels = torch.tensor(digits.target)
    digit = F.pad(
        F.interpolate(images[DIGIT : DIGIT + 1], size=(30, 30), mode="bilinear"), [BORDER] * 4
    )
    figure, axes = plt.subplots(2, 5, figsize=(9.2, 4.3), layout="constrained")
    torch.manual_seed(0)
    for line, (name, body) in zip(axes, bodies().items(), strict=True):
        head = trained(body, images, labels)
        with torch.no_grad():
            upright = percent_right(body, head, images[1400:], labels[1400:])
            rotated = percent_right(body, head, images[1400:].rot90(1, (2, 3)), labels[1400:])
            show(line, digit, body)
        line[0].set_ylabel(
            f"{name}\nreads {upright:.0f} % upright,\n{rotated:.0f} % rotated", fontsize=11
        )
    figure.savefig(Path(__file__).parent / "_static" / "turning.png", dpi=110)


if __name__ == "__main__":
    main()
