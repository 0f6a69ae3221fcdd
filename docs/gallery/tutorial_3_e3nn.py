r"""
Global context in an e3nn model
===============================

Layers in which every point sees all others, in :math:`O(N \log N)` operations and with exact symmetry. The tutorial shows
shapes, a mixed model, the symmetry in numbers and pictures, which layer to use for a chain and for a cloud of charges, and
how to save a model.
"""

# %%
# Layers and shapes
# -----------------
#
# Features have irreps. Graphs lie one after the other, with a sorted ``batch``. Positions enter relative to the mean of their
# graph. ``IrrepsSE3HyenaOperator`` takes and returns ``0e``, ``0o``, ``1o`` and ``1e`` with any multiplicities.

import io

import matplotlib.pyplot as plt
import torch
from e3nn import nn, o3
from e3nn.util.test import equivariance_error
from tg_equiattn.integrations.e3nn import (
    IrrepsEwaldAttention,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
)

torch.manual_seed(0)
operator = IrrepsSE3HyenaOperator("4x0e + 1x1o", "16x0e + 8x1o")
print(operator)

x, pos = o3.Irreps("4x0e + 1x1o").randn(12, -1), torch.randn(12, 3)
batch = torch.tensor([0] * 5 + [1] * 7)
print(tuple(operator(x, pos, batch).shape))

# %%
# Mixing with e3nn's layers
# -------------------------
#
# Layers with matching irreps can be combined. This model has two steps of message passing along a chain, made of e3nn's parts,
# and the operator between them.


class Messages(torch.nn.Module):
    """x_i + mean over neighbors of a tensor product of x_j with the direction of the edge."""

    def __init__(self, irreps):
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct(irreps, "1x0e + 1x1o", irreps)

    def forward(self, x, pos, edge_index):
        source, target = edge_index
        directions = o3.spherical_harmonics(
            "1x0e + 1x1o", pos[source] - pos[target], normalize=True
        )
        return x.index_add(0, target, self.product(x[source], directions) / 2)


class Model(torch.nn.Module):
    def __init__(self, context):
        super().__init__()
        gate = nn.Gate("16x0e", [torch.relu], "8x0e", [torch.sigmoid], "8x1o")
        self.embed = torch.nn.Sequential(o3.Linear("4x0e + 1x1o", gate.irreps_in), gate)
        self.before, self.after = Messages(gate.irreps_out), Messages(gate.irreps_out)
        self.context = IrrepsSE3HyenaOperator(gate.irreps_out, gate.irreps_out) if context else None
        self.head = o3.Linear(gate.irreps_out, "1x1o")

    def forward(self, x, pos, edge_index, batch=None):
        x = self.before(self.embed(x), pos, edge_index)
        x = x if self.context is None else self.context(x, pos, batch)
        return self.head(self.after(x, pos, edge_index))


# %%
# A chain of 40 points along a curve, each with four scalars and a vector:

angle = torch.linspace(0, 4 * torch.pi, 40)
chain = torch.stack([angle.cos(), angle.sin(), 0.15 * angle], 1)
along = torch.arange(39)
edges = torch.stack([torch.cat([along, along + 1]), torch.cat([along + 1, along])])
features = o3.Irreps("4x0e + 1x1o").randn(40, -1)
model = Model(context=True)
print(tuple(model(features, chain, edges).shape))

# %%
# Who sees whom
# -------------
#
# The pictures show how much the output vector of each point changes with the features of each other point. Messages reach two
# points in each direction. With the operator between them, every point sees the whole chain.


def influence(model):
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x, chain, edges), features)
    return jacobian.pow(2).sum((1, 3)).sqrt()


figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for axis, context, title in zip(
    axes, (False, True), ("messages alone", "with IrrepsSE3HyenaOperator"), strict=True
):
    torch.manual_seed(1)
    strength = influence(Model(context)).clamp(min=1e-6).log10()
    image = axis.imshow(strength, vmin=-5, vmax=0)
    axis.set(title=title, xlabel="changed point", ylabel="output of point")
figure.colorbar(image, ax=axes, label="log10 of the change")
plt.show()

# %%
# Checking equivariance
# ---------------------
#
# e3nn's own check, for rotations, inversion and translations, in float32. ``irreps_in`` is ``None`` for inputs that do not
# transform, such as the edges.

errors = equivariance_error(
    model,
    args_in=[features, chain, edges],
    irreps_in=["4x0e + 1x1o", "cartesian_points", None],
    irreps_out=["1x1o"],
)
for (parity, translated), error in errors.items():
    print(f"inversion {parity}, translation {translated}: {float(error.max()):.0e}")

# %%
# Outputs of a chain and of the rotated chain
# -------------------------------------------
#
# The symmetry as a picture: output vectors of the chain, output vectors of the rotated chain, and the first vectors rotated.
# The last two are equal.

rotation = o3.rand_matrix()
of_features = o3.Irreps("4x0e + 1x1o").D_from_matrix(rotation)
with torch.no_grad():
    here = model(features, chain, edges)
    there = model(features @ of_features.T, chain @ rotation.T, edges)
expected = here @ rotation.T

figure = plt.figure(figsize=(9, 3.4), layout="constrained")
shown = [
    ("outputs", chain, here),
    ("outputs of the rotated chain", chain @ rotation.T, there),
    (
        f"outputs, rotated: difference {(there - expected).abs().max():.0e}",
        chain @ rotation.T,
        expected,
    ),
]
for number, (title, points, vectors) in enumerate(shown, start=1):
    axis = figure.add_subplot(1, 3, number, projection="3d")
    points = points - points.mean(0)
    axis.plot(*points.T, color="0.6")
    axis.quiver(
        *points.T, *(0.8 * vectors / vectors.norm(dim=1).max()).T, color="C0", linewidth=1.2
    )
    axis.set_title(title, fontsize=9)
    axis.set(
        xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1), xticklabels=[], yticklabels=[], zticklabels=[]
    )
plt.show()

# %%
# Order
# -----
#
# A convolution depends on the order of its tokens.
#
# - ``order="input"``, the default, keeps the order of the nodes. Use it for chains.
# - ``order="radial"`` sorts points by their distance to the centroid. Relabelling points then changes nothing, unless a symmetry
#   of the cloud exchanges points. But outputs jump where two points exchange radii, so it is not for energies:
#   see :doc:`guarantees </guarantees>`.
# - ``IrrepsVectorSelfAttention`` needs no order, and takes :math:`O(N^2)` operations.

cloud, values, relabelled = torch.randn(30, 3), torch.randn(30, 7), torch.randperm(30)
layers = {
    'order="input"': IrrepsSE3HyenaOperator("4x0e + 1x1o", "1x1o"),
    'order="radial"': IrrepsSE3HyenaOperator("4x0e + 1x1o", "1x1o", order="radial"),
    "IrrepsVectorSelfAttention": IrrepsVectorSelfAttention("4x0e + 1x1o", "1x1o"),
}
for name, layer in layers.items():
    with torch.no_grad():
        before, after = (
            layer(values, cloud)[relabelled],
            layer(values[relabelled], cloud[relabelled]),
        )
    print(f"{name:20} relabelled: {((after - before).abs().max() / before.abs().max()).item():.0e}")

# %%
# A protein-like chain
# --------------------
#
# Residues have charges and vectors. The target of each residue is its vector times the field of all charges, which decays over
# six residues along the chain. Training uses fragments of 24 residues. Where a fragment was cut has no meaning, so
# ``filter="implicit"`` fits: it depends on the lag of two residues only. The paper's filter, ``"data"``, depends on indices, and
# has to learn the same rule for each of them. The difference holds on chains of 96 residues too, although training shows 23 of
# their 95 lags. See :doc:`chains </chains>`.


def fit(model, draw, steps=300):
    """The model, trained on new examples at every step."""
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps)
    for _ in range(steps):
        *arguments, target = draw(32)
        optimizer.zero_grad()
        (model(*arguments) - target).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model


def fragments(count, length=24):
    """Charges and vectors of residues, no positions, chain indices, vectors times the field."""
    charges, vectors = torch.randn(count, length, 1), torch.randn(count, length, 3)
    place = torch.arange(length)
    field = torch.exp(-(place[:, None] - place).abs() / 6) @ charges
    batch = torch.arange(count).repeat_interleave(length)
    x = torch.cat([charges, vectors], -1).flatten(0, 1)
    return x, None, batch, (vectors * field).flatten(0, 1)


figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True, layout="constrained")
for name, color in {"data": "C1", "implicit": "C0"}.items():
    torch.manual_seed(0)
    trained = fit(
        IrrepsSE3HyenaOperator("1x0e + 1x1o", "1x1o", "8x0e + 8x1o", filter=name), fragments
    )
    for axis, length in zip(axes, (24, 96), strict=True):
        *arguments, target = fragments(100, length)
        with torch.no_grad():
            out = trained(*arguments)
        share = ((out - target).square().mean() / target.square().mean()).item()
        label = f"{name}: error {share:.2f}"
        axis.plot(target[:2000, 0], out[:2000, 0], ".", color=color, markersize=2, label=label)
        axis.set(title=f"{length} residues", xlim=(-8, 8), ylim=(-8, 8))
        axis.set(xlabel="true x component", ylabel="predicted")
        axis.legend(fontsize=8)
plt.show()

# %%
# A cloud of charges
# ------------------
#
# The target is the potential of every charge in the field of all others. Charges have no order, so do not sort them:
# ``IrrepsEwaldAttention`` sums kernels of the distance over all points. It is smooth, and relabelling points changes nothing. A
# long convolution in radial order sees all points too, but hardly learns distances.


def clouds(count, points=24):
    """Ones and charges, positions in a box, cloud indices, softened Coulomb potentials."""
    positions, charges = 6 * torch.rand(count, points, 3), torch.randn(count, points, 1)
    potential = (torch.cdist(positions, positions).square() + 0.5).rsqrt() @ charges
    batch = torch.arange(count).repeat_interleave(points)
    x = torch.cat([torch.ones_like(charges), charges], -1)
    return x.flatten(0, 1), positions.flatten(0, 1), batch, potential.flatten(0, 1)


layers = {
    "IrrepsSE3HyenaOperator, sorted by radius": IrrepsSE3HyenaOperator(
        "2x0e", "1x0e", "8x0e + 8x1o", order="radial"
    ),
    "IrrepsEwaldAttention": IrrepsEwaldAttention("2x0e", "1x0e", width=0.5, lmax=0),
}
figure, axis = plt.subplots(figsize=(4.5, 4.2), layout="constrained")
for (name, layer), color in zip(layers.items(), ("C1", "C0"), strict=True):
    *arguments, target = clouds(100)
    out = fit(layer, clouds)(*arguments)
    share = ((out - target).square().mean() / target.var()).item()
    axis.plot(
        target, out.detach(), ".", color=color, markersize=2, label=f"{name}: error {share:.2f}"
    )
axis.set(xlabel="true potential", ylabel="predicted")
axis.legend(fontsize=8)
plt.show()

# %%
# Saving and loading
# ------------------
#
# The layers are torch modules: ``state_dict()``, pickle and ``copy.deepcopy`` work.

buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
again = Model(context=True)
again.load_state_dict(torch.load(buffer, weights_only=True))
with torch.no_grad():
    print("the same after loading:", torch.equal(again(features, chain, edges), here))
