"""Quick start with escnn: group attention between the convolutions of a G-CNN, to read digits rotated by any angle.

Features are equivariant to rotations by 90 degrees, for all weights. Other angles are learned from the data.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from escnn import gspaces, nn
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tg_equiattn.integrations.escnn import R2GroupAttention
from tqdm import trange

from tg_equiattn.groups import cyclic
from tg_equiattn.testing import equivariance_error

gspace = gspaces.rot2dOnR2(4)  # the plane and its rotations by 90 degrees
image = nn.FieldType(gspace, [gspace.trivial_repr])
hidden = nn.FieldType(gspace, 16 * [gspace.regular_repr])  # 16 features, each in 4 orientations


def convolution(fields):
    return nn.R2Conv(fields, hidden, kernel_size=3, padding=1), nn.InnerBatchNorm(hidden), nn.ReLU(hidden)


torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
attention = R2GroupAttention(hidden, hidden, heads=8, head_channels=4, kernel_size=3, relation="relative")
body = nn.SequentialModule(
    *convolution(image), *convolution(hidden), nn.PointwiseMaxPool(hidden, kernel_size=2),
    attention, nn.InnerBatchNorm(hidden), nn.ReLU(hidden), *convolution(hidden),
)  # fmt: skip
invariant = nn.GroupPooling(hidden)  # the largest orientation of every feature
head = torch.nn.Sequential(torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10))


def rotated(images):
    """The 8 x 8 images on 12 x 12 pixels, each rotated about its centre by a random angle."""
    angles, zero = 2 * torch.pi * torch.rand(len(images)), torch.zeros(len(images))
    rows = 1.4 * torch.stack([angles.cos(), -angles.sin(), zero, angles.sin(), angles.cos(), zero], 1)
    grid = F.affine_grid(rows.view(-1, 2, 3), [len(images), 1, 12, 12], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


digits, labels = map(torch.tensor, load_digits(return_X_y=True))
digits = digits.float().view(-1, 1, 8, 8) / 16
train, test = torch.randperm(len(digits)).split([1200, 597])
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=15 * 30)
for _ in trange(15, desc="training", disable=None):
    for batch in train[torch.randperm(1200)].split(40):
        optimizer.zero_grad()
        F.cross_entropy(head(invariant(body(image(rotated(digits[batch])))).tensor), labels[batch]).backward()
        optimizer.step()
        schedule.step()

body.eval()
images = rotated(digits[test])
with torch.no_grad():
    right = head(invariant(body(image(images))).tensor).argmax(1) == labels[test]
    error = equivariance_error(lambda x: body(image(x)).tensor.unflatten(1, (16, 4)), cyclic(4), images[:20])
    maps = body(image(x := torch.cat([images[:1], images[:1].rot90(1, (2, 3))]))).tensor[:, :4]
print(f"{right.float().mean():.1%} of test digits right, rotated by any angle; equivariance error {error:.0e}")
expected = maps[0].roll(1, 0).rot90(1, (1, 2))  # each map rotates, and moves to the next orientation
pictures = [x[0, 0], *maps[0], x[1, 0], *maps[1], x[1, 0], *expected]
axes = (figure := Figure(figsize=(13, 9), layout="constrained")).subplots(3, 5, subplot_kw={"xticks": [], "yticks": []})
for axis, picture in zip(axes.flat, pictures, strict=True):
    axis.imshow(picture)
figure.suptitle("Rows: a digit and one feature in 4 orientations; both for the digit rotated; what we expect")
Path("out").mkdir(exist_ok=True)
figure.savefig("out/quickstart_escnn.png")
print("figure: out/quickstart_escnn.png")
