r"""
Group attention in an escnn model
=================================

Attention layers between the layers of escnn. The tutorial shows shapes, a mixed model, a short training, the symmetry
in numbers, feature maps and attention maps, and how to save a model.
"""

# %%
# Layers and shapes
# -----------------
#
# A layer has an input type and an output type, like every module of escnn. ``R2LiftingAttention`` maps trivial fields
# (the channels of an image) to regular fields. ``R2GroupAttention`` maps regular fields to regular fields. Both keep
# height and width.

import copy
import io

import matplotlib.pyplot as plt
import torch
from escnn import gspaces, nn
from sklearn.datasets import load_digits
from tg_equiattn.integrations.escnn import (
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    R2LiftingAttention,
    group_from_gspace,
)
from tg_equiattn.testing import act, equivariance_error

torch.manual_seed(0)
gspace = gspaces.rot2dOnR2(4)  # rotations by 90 degrees
image = nn.FieldType(gspace, [gspace.trivial_repr])
hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])

lift = R2LiftingAttention(image, hidden, kernel_size=5)
attend = R2GroupAttention(hidden, hidden, kernel_size=5)

x = image(torch.randn(2, 1, 17, 17))
print("image   ", tuple(x.shape))
print("lifted  ", tuple(lift(x).shape), "= 8 fields of 4 group elements")
print("attended", tuple(attend(lift(x)).shape))

# %%
# Mixing with escnn's layers
# --------------------------
#
# Layers on regular fields can be combined: convolutions, batch normalisation, pooling, attention. This G-CNN has an
# attention block between its convolutions. ``R2AttentionBlock`` is the residual block of the papers: norm, attention
# and a pointwise bottleneck.


def convolution(fields_in, fields_out):
    return nn.SequentialModule(
        nn.R2Conv(fields_in, fields_out, kernel_size=3, padding=1, bias=False),
        nn.InnerBatchNorm(fields_out),
        nn.ReLU(fields_out),
    )


features = nn.SequentialModule(
    convolution(image, hidden),
    convolution(hidden, hidden),
    nn.PointwiseMaxPool(hidden, kernel_size=2),
    R2AttentionBlock(R2GroupAttention(hidden, hidden, kernel_size=3, relation="relative")),
    convolution(hidden, hidden),
)
invariant = nn.SequentialModule(features, nn.GroupPooling(hidden))
classifier = torch.nn.Linear(8, 10)


def logits(images):
    return classifier(invariant(image(images)).tensor.mean((2, 3)))


# %%
# A short training
# ----------------
#
# Scikit-learn's handwritten digits, enlarged to 12 x 12 pixels: 1,000 upright digits to train, 400 to test. The test
# digits are also rotated. The model has never seen a rotated digit, and reads them equally well because of its symmetry.

digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
pixels = torch.nn.functional.interpolate(pixels, size=(12, 12), mode="bilinear")
labels = torch.tensor(digits.target)
train_x, train_y, test_x, test_y = (
    pixels[:1000],
    labels[:1000],
    pixels[1000:1400],
    labels[1000:1400],
)

optimizer = torch.optim.Adam([*invariant.parameters(), *classifier.parameters()], lr=0.02)
for epoch in range(6):
    for chosen in torch.randperm(1000).split(20):
        loss = torch.nn.functional.cross_entropy(logits(train_x[chosen]), train_y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

invariant.eval()
with torch.no_grad():
    for quarter in range(4):
        right = logits(test_x.rot90(quarter, (2, 3))).argmax(1) == test_y
        accuracy = right.float().mean()
        print(f"test digits rotated by {90 * quarter:3} degrees: {accuracy:.1%} right")

# %%
# Checking equivariance
# ---------------------
#
# ``check_equivariance`` of an attention layer tests every group element that maps the pixel grid to itself. There is no
# interpolation. It returns the largest error of each element, relative to the output, and raises an error if one is too high.

for element, error in features[3].check_equivariance():
    print(element, f"{error:.0e}")

# %%
# ``tg_equiattn.testing`` checks whole models and any other module. ``act`` transforms an image or a regular feature map,
# and ``equivariance_error`` compares.

group = group_from_gspace(gspace)


def feature_map(images):
    """(B, 1, H, W) -> (B, fields, |H|, H, W)."""
    return features(image(images)).tensor.unflatten(1, (-1, len(group)))


print(f"features of the trained model: {equivariance_error(feature_map, group, test_x[:8]):.0e}")

# %%
# Feature maps of an image and of the rotated image
# -------------------------------------------------
#
# The symmetry as a picture. First row: a digit and one field of its feature map, for the four group elements h. Second
# row: the digit rotated by 90 degrees and its feature map. Third row: how a rotation by 90 degrees acts on the regular
# field of the first row. Each map rotates, and moves to the next group element. The second and the third row are equal.
# The digit is enlarged for the picture: the layers take any size.

digit = torch.nn.functional.interpolate(test_x[3:4], size=(36, 36), mode="bilinear")
digit = torch.nn.functional.pad(digit, [10] * 4)
rotated = act(digit, group, 1)
with torch.no_grad():
    here, there = feature_map(digit), feature_map(rotated)
expected = act(here, group, 1)
inside = here[0, ..., 4:-4, 4:-4].flatten(1)
field = int(inside.std(1).argmax())  # the liveliest

rows = [("x", digit, here), ("rotated x", rotated, there), ("expected", rotated, expected)]
figure, axes = plt.subplots(3, 5, figsize=(8, 5), layout="constrained")
for line, (name, picture, maps) in zip(axes, rows, strict=True):
    line[0].imshow(picture[0, 0], cmap="gray")
    line[0].set_ylabel(name)
    for h in range(4):
        line[1 + h].imshow(
            maps[0, field, h], vmin=float(inside[field].min()), vmax=float(inside[field].max())
        )
for h in range(4):
    axes[0, 1 + h].set_title(f"feature map, h = {h}", fontsize=9)
for axis in axes.flat:
    axis.set_xticks([])
    axis.set_yticks([])
figure.suptitle(
    f"largest difference between the second and the third row: {(there - expected).abs().max():.0e}"
)
plt.show()

# %%
# Attention maps of an image and of the rotated image
# ---------------------------------------------------
#
# ``attention_map`` returns the weights by which the output of one pixel averages the values, for every head and group
# element. Here they are the weights of a new ``R2GlobalAttention`` behind the trained convolutions. It sees all pixels:
# those of its window by exact weights, and all others by random features.

attention = R2GlobalAttention(hidden, hidden, kernel_size=3).eval()
convolutions = features[:3]  # up to the pool: 56 x 56 pixels become 28 x 28
side, (row, column) = 28, (8, 12)
rotated_pixel = (side - 1 - column, row)

with torch.no_grad():
    weights = attention.attention_map(convolutions(image(digit)), (row, column))[:, :, :, 0, 0]
    rotated_weights = attention.attention_map(convolutions(image(rotated)), rotated_pixel)[
        :, :, :, 0, 0
    ]
print("(B, heads, |H|, H, W):", tuple(weights.shape))
print(f"sum over pixels: {weights.sum((3, 4)).min():.6f} to {weights.sum((3, 4)).max():.6f}")

# %%
# The attention map of the pixel rotates with the image, and its elements move by one, as for a feature map. This holds for
# every head, and for the weights of random features too.

expected = act(weights, group, 1)
difference = (rotated_weights - expected).abs().max()
print(f"largest difference of two weights: {difference:.0e}")
assert difference < 1e-5

# %%
# The maps of one head for the pixel under the cross. The head starts by looking one pixel to the side, in the direction of
# h. Most of the weight is there. The colour scale ends below the weights of the window, so that weights of all other
# pixels are visible. They follow the content.

head = 1
rows = [
    ("x", digit, (row, column), weights),
    ("rotated x", rotated, rotated_pixel, rotated_weights),
    ("expected", rotated, rotated_pixel, expected),
]
figure, axes = plt.subplots(3, 5, figsize=(8, 5), layout="constrained")
for line, (name, picture, (down, right), maps) in zip(axes, rows, strict=True):
    maps = maps[0, head]
    top = float(maps.flatten(1).sort().values[:, -10].max())  # after the 9 pixels of the window
    line[0].imshow(picture[0, 0], cmap="gray", extent=(0, side, side, 0))
    line[0].plot(right + 0.5, down + 0.5, "+", color="tab:red", markersize=10)
    line[0].set_ylabel(name)
    for h in range(4):
        line[1 + h].imshow(maps[h], vmin=float(maps.min()), vmax=top)
for h in range(4):
    axes[0, 1 + h].set_title(f"attention map, h = {h}", fontsize=9)
for axis in axes.flat:
    axis.set_xticks([])
    axis.set_yticks([])
figure.suptitle(f"largest difference between the second and the third row: {difference:.0e}")
plt.show()

# %%
# Saving and loading
# ------------------
#
# Models of escnn cannot be pickled, because its field types cannot. Save the ``state_dict()``, or call ``export()``. It returns
# a plain torch module, which can be pickled, copied and compiled.

buffer = io.BytesIO()
torch.save(attend.state_dict(), buffer)
buffer.seek(0)
again = R2GroupAttention(hidden, hidden, kernel_size=5)
again.load_state_dict(torch.load(buffer, weights_only=True))

plain = attend.export()
copied = copy.deepcopy(plain)
y = lift(x)
print(
    torch.equal(again(y).tensor, attend(y).tensor), torch.equal(copied(y.tensor), attend(y).tensor)
)
