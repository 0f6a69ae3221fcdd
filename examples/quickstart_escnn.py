"""Quick start with escnn: which two of six noise patterns are equal up to a rotation by 90 degrees?

Attention over all pixels compares patterns never seen before. A group CNN, also with a mean over the image, cannot.
"""

from pathlib import Path
from time import process_time

import torch
from escnn import gspaces, nn
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tg_equiattn.integrations.escnn import R2GroupAttention, R2RegularLayerNorm
from tqdm import trange

PAIRS = torch.combinations(torch.arange(6), 2)
gspace = gspaces.rot2dOnR2(4)  # the plane and its rotations by 90 degrees
image = nn.FieldType(gspace, [gspace.trivial_repr])


def canvases(count):
    """Images of 3 x 3 cells, six of them with a pattern of 4 x 4 pixels; the six cells; and which pair is equal."""
    patterns, labels, turns = torch.randn(count, 6, 4, 4), torch.randint(15, (count,)), torch.randint(4, (count,))
    each, (first, second) = torch.arange(count), PAIRS[labels].T
    rotated = torch.stack([patterns[each, first].rot90(k, (1, 2)) for k in range(4)])
    patterns[each, second] = rotated[turns, each]
    cells = torch.rand(count, 9).argsort(1)[:, :6]
    canvas = torch.zeros(count, 9, 4, 4)
    canvas[each[:, None], cells] = patterns
    return canvas.unflatten(1, (3, 3)).transpose(2, 3).reshape(count, 1, 12, 12), cells, labels


def attention(fields):
    return R2GroupAttention(fields, fields, kernel_size=None, heads=4, head_channels=8, relation="relative")


class ConvolutionAndMean(nn.R2Conv):
    """The rival: a 3 x 3 convolution, plus a map of the mean over the image, which all cells see."""

    def __init__(self, fields):
        super().__init__(fields, fields, kernel_size=3, padding=1)
        self.of_mean = nn.R2Conv(fields, fields, kernel_size=1)

    def forward(self, x):
        mean = x.tensor.mean((2, 3), keepdim=True).expand_as(x.tensor)
        return super().forward(x) + self.of_mean(nn.GeometricTensor(mean, x.type))


class Model(torch.nn.Module):
    """Embeds each cell of 4 x 4 pixels, lets cells see each other in residual layers, and scores each cell."""

    def __init__(self, channels, layer, depth, norm):
        super().__init__()
        fields, wide = (nn.FieldType(gspace, n * channels * [gspace.regular_repr]) for n in (1, 2))
        self.embed = nn.R2Conv(image, fields, kernel_size=4, stride=4, frequencies_cutoff=3.0)
        self.branches = torch.nn.ModuleList()
        for _ in range(depth):
            pointwise = nn.R2Conv(fields, wide, 1), nn.ReLU(wide), nn.R2Conv(wide, fields, 1)
            self.branches.append(nn.SequentialModule(norm(fields), layer(fields)))
            self.branches.append(nn.SequentialModule(norm(fields), *pointwise))
        self.last = nn.SequentialModule(norm(fields), nn.GroupPooling(fields))
        self.score = torch.nn.Linear(channels, 1)

    def forward(self, images):
        x = self.embed(image(images))
        for branch in self.branches:
            x = x + branch(x)
        return self.score(self.last(x).tensor.movedim(1, -1))[..., 0]


def of_pairs(scores, cells):
    """The score of a pair is the sum of the scores of its cells."""
    return scores.flatten(1).gather(1, cells)[:, PAIRS].sum(2)


torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
models = {  # the rival is as wide and deep, and trains at the rate and with the norm, that are best for it
    "group CNN": (lambda: Model(9, ConvolutionAndMean, 4, nn.InnerBatchNorm), 0.03, 850),
    "with attention": (lambda: Model(12, attention, 2, R2RegularLayerNorm), 0.01, 600),
}
axes = (figure := Figure(figsize=(12, 4.6), layout="constrained")).subplots(
    2, 6, subplot_kw={"xticks": [], "yticks": []}
)
for (name, (make, rate, steps)), row in zip(models.items(), axes, strict=True):
    torch.manual_seed(0)
    model, start = make(), process_time()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    for _ in trange(steps, desc=name, disable=None):
        images, cells, labels = canvases(32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(of_pairs(model(images), cells), labels).backward()
        optimizer.step()
        schedule.step()
    seconds = process_time() - start
    torch.manual_seed(1)
    images, cells, labels = canvases(1000)
    with torch.no_grad():
        scores = model.eval()(images)
        error = (model(images.rot90(1, (2, 3))) - scores.rot90(1, (1, 2))).abs().max() / scores.abs().max()
    found = of_pairs(scores, cells).argmax(1)
    right = (found == labels).float().mean()
    print(f"{name}: {right:.1%} of pairs found, {seconds:.0f} s of training; equivariance error {error:.0e}")
    for axis, canvas, places, pair, label in zip(row, images, cells, found, labels, strict=False):
        axis.imshow(canvas[0], cmap="gray")
        for cell in places[PAIRS[pair]].tolist():
            corner, color = (cell % 3 * 4 - 0.5, cell // 3 * 4 - 0.5), "tab:green" if pair == label else "tab:red"
            axis.add_patch(Rectangle(corner, 4, 4, fill=False, linewidth=4, edgecolor=color))
    row[0].set_ylabel(f"{name}: {right:.0%}")
figure.suptitle("The pair that a model finds in six test images: green if it is right")
Path("out").mkdir(exist_ok=True)
figure.savefig("out/quickstart_escnn.png")
print("figure: out/quickstart_escnn.png")
