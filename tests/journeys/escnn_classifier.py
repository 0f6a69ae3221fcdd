"""A newcomer puts group attention into a classifier of escnn, after reading these pages and no others."""

import torch
from escnn import nn
from escnn.gspaces import rot2dOnR2
from sklearn.datasets import load_digits
from tg_equiattn.integrations.escnn import R2GroupAttention

PAGES = ["README.md", "docs/gallery/tutorial_1_escnn.py"]

torch.manual_seed(0)
gspace = rot2dOnR2(4)
image = nn.FieldType(gspace, [gspace.trivial_repr])
hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
features = nn.SequentialModule(
    nn.R2Conv(image, hidden, kernel_size=3, padding=1),
    nn.InnerBatchNorm(hidden),
    nn.ReLU(hidden),
    nn.PointwiseMaxPool(hidden, kernel_size=2),
    R2GroupAttention(hidden, hidden, kernel_size=3),
    nn.InnerBatchNorm(hidden),
    nn.ReLU(hidden),
    nn.GroupPooling(hidden),
)
classifier = torch.nn.Linear(8, 10)


def logits(images):
    return classifier(features(image(images)).tensor.amax((2, 3)))


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
optimizer = torch.optim.Adam([*features.parameters(), *classifier.parameters()], lr=0.02)
LOSSES = []
for _ in range(3):
    for chosen in torch.randperm(1000).split(50):
        loss = torch.nn.functional.cross_entropy(logits(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        LOSSES.append(loss.item())

features.eval()
with torch.no_grad():
    upright, rotated = logits(images[1000:1100]), logits(images[1000:1100].rot90(1, (2, 3)))
ERROR = ((upright - rotated).abs().max() / upright.abs().max()).item()
