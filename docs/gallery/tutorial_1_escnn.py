r"""
Group attention in an escnn model
=================================

Attention layers between escnn's own: shapes, a mixed model, a short training, the symmetry checked and looked at, in
feature maps and in attention maps, and how to save. Everything runs on two CPU cores in well under a minute.
"""

# %%
# Layers and shapes
# -----------------
#
# A layer has an input and an output type, as every module of escnn. ``R2LiftingAttention`` goes from trivial fields
# (the channels of an image) to regular fields, ``R2GroupAttention`` from regular fields to regular fields. Both
# keep height and width.

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
gspace = gspaces.rot2dOnR2(4)  # rotations by quarter turns
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
# Anything that maps regular fields to regular fields can stand before or after: convolutions, batch normalisation,
# pooling. Here a G-CNN has an attention block in its middle. ``R2AttentionBlock`` is the papers' residual block: norm,
# attention and a pointwise bottleneck.


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
# Scikit-learn's handwritten digits, enlarged to 12 x 12: 1,000 upright ones to train, and 400 to test, upright and
# turned. The model has never seen a turned digit; that it reads them as well is what the symmetry is for.

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
    for turns in range(4):
        right = logits(test_x.rot90(turns, (2, 3))).argmax(1) == test_y
        accuracy = right.float().mean()
        print(f"test digits rotated by {90 * turns:3} degrees: {accuracy:.1%} right")

# %%
# Checking equivariance
# ---------------------
#
# ``check_equivariance`` of an attention layer tests every element that maps the pixel grid to itself, without any
# interpolation, and returns the mean error for each. It raises where an error is too high.

for element, error in features[3].check_equivariance():
    print(element, f"{error:.0e}")

# %%
# ``tg_equiattn.testing`` does the same for whole models, and for modules that are not from here. ``act`` moves an
# image or a regular feature map; ``equivariance_error`` compares.

group = group_from_gspace(gspace)


def feature_map(images):
    """(B, 1, H, W) -> (B, fields, |H|, H, W)."""
    return features(image(images)).tensor.unflatten(1, (-1, len(group)))


print(f"features of the trained model: {equivariance_error(feature_map, group, test_x[:8]):.0e}")

# %%
# Feature maps of an image and of the image turned
# ------------------------------------------------
#
# The same on a picture. The first row is a digit and one field of its feature map, at the four elements of the
# group. The second row is the digit turned by 90 degrees and *its* feature map. The third is the first row's
# feature map, turned and with its elements moved on by one, which is how a quarter turn acts on a regular field.
# The second and the third row are equal. The digit is enlarged once more, for the eye: the layers take any size.

digit = torch.nn.functional.interpolate(test_x[3:4], size=(36, 36), mode="bilinear")
digit = torch.nn.functional.pad(digit, [10] * 4)
turned = act(digit, group, 1)
with torch.no_grad():
    here, there = feature_map(digit), feature_map(turned)
expected = act(here, group, 1)
inside = here[0, ..., 4:-4, 4:-4].flatten(1)
field = int(inside.std(1).argmax())  # the liveliest

rows = [("x", digit, here), ("turned x", turned, there), ("expected", turned, expected)]
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
# Attention maps of an image and of the image turned
# --------------------------------------------------
#
# ``attention_map`` returns the weights by which the output of a pixel averages the values, from the code that computes
# the output: for every head and element of the group, as here every element looks at itself. They are those of a new
# ``R2GlobalAttention`` behind the convolutions that were trained. Its output sees all pixels, those of its window by
# exact weights and all others by random features.

attention = R2GlobalAttention(hidden, hidden, kernel_size=3).eval()
convolutions = features[:3]  # up to the pool: 56 x 56 pixels become 28 x 28
side, (row, column) = 28, (8, 12)
turned_pixel = (side - 1 - column, row)

with torch.no_grad():
    weights = attention.attention_map(convolutions(image(digit)), (row, column))[:, :, :, 0, 0]
    turned_weights = attention.attention_map(convolutions(image(turned)), turned_pixel)[
        :, :, :, 0, 0
    ]
print("(B, heads, |H|, H, W):", tuple(weights.shape))
print(f"sum over pixels: {weights.sum((3, 4)).min():.6f} to {weights.sum((3, 4)).max():.6f}")

# %%
# The pixel's map turns with the image, and its elements are moved on by one: it is what ``act`` makes of it, as of a
# feature map. This holds for every head by itself, and for the weights of random features as well.

expected = act(weights, group, 1)
difference = (turned_weights - expected).abs().max()
print(f"largest difference of two weights: {difference:.0e}")
assert difference < 1e-5

# %%
# One head's maps of the pixel under the cross. The head starts by looking one pixel aside, to the side that h says.
# Most of the weight is there; the colour scale ends below the weights of the window, so that those of all other pixels
# are seen, which follow the content.

head = 1
rows = [
    ("x", digit, (row, column), weights),
    ("turned x", turned, turned_pixel, turned_weights),
    ("expected", turned, turned_pixel, expected),
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
# escnn's field types do not pickle, and so escnn models do not. Keep the ``state_dict()``, or ``export()`` to a plain
# torch module, which pickles, deep-copies and compiles.

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
