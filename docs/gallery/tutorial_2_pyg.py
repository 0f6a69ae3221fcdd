r"""
Relative positions in a PyG model
=================================

Global attention over the nodes of a graph in linear time, as a layer of PyG. The tutorial shows shapes, a mixed model, the
symmetry in numbers and pictures, and how to save a model.
"""

# %%
# Images as graphs of pixels
# --------------------------
#
# The transform ``PixelGraph`` makes a graph of ``data.image``. Pixels become nodes with positions, and near pixels are joined
# by edges. PyG's ``Cartesian`` writes the offsets of edges, differences of positions, into ``edge_attr``.

import io

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from tg_equiattn.integrations.pyg import PixelGraph, RelativePerformerConv
from tg_equiattn.nn import RelativePerformer
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, GPSConv, global_mean_pool
from torch_geometric.transforms import Cartesian, Compose

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
pixel_graph = PixelGraph(cutoff=4)
to_graph = Compose([pixel_graph, Cartesian(norm=False)])
labels = torch.tensor(digits.target)
graphs = [to_graph(Data(image=images[n], y=labels[n])) for n in range(32)]
print(graphs[0])

# %%
# The layer
# ---------
#
# In ``RelativePerformerConv``, every node attends to all nodes of its graph. Near pairs, the edges, have exact softmax
# weights with a learned bias of the offset. Other pairs have weights by random features, in linear time. For graphs as small
# as these, ``method="pairs"`` is exact and faster.

conv = RelativePerformerConv(1, 16, heads=4, cutoff=4, method="features")
data = next(iter(DataLoader(graphs, batch_size=8)))
print(
    tuple(conv(data.x, data.edge_index, data.batch, pos=data.pos).shape), "of 8 graphs of 64 nodes"
)

# %%
# If all graphs are images of one size, pass the grid as ``neighbors`` in place of edges and positions. This is fastest, and the
# result is the same.

grid = pixel_graph.grid(8, 8)
with torch.no_grad():
    by_edges = conv(data.x, data.edge_index, data.batch, pos=data.pos)
    by_grid = conv(data.x, neighbors=grid)
print(f"largest difference {(by_edges - by_grid).abs().max():.0e}")

# %%
# Mixing with PyG's layers
# ------------------------
#
# The layer takes the arguments of PyG's layers, so it can be used beside them, or as the ``conv`` of a ``GPSConv``. ``GPSConv``
# does not pass ``batch`` to its ``conv``. Pass ``ptr`` instead, which reaches the layer.


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(1, 16)
        self.messages = GINEConv(perceptron(), edge_dim=2)
        self.attention = RelativePerformerConv(16, 16, heads=4, cutoff=4, method="pairs")
        self.gps = GPSConv(
            16, RelativePerformerConv(16, 16, heads=4, cutoff=4, method="pairs"), heads=2
        )
        self.head = torch.nn.Linear(16, 10)

    def forward(self, data):
        x = self.messages(self.embed(data.x), data.edge_index, data.edge_attr).relu()
        x = x + self.attention(x, data.edge_index, data.batch, pos=data.pos)
        x = self.gps(x, data.edge_index, data.batch, ptr=data.ptr, pos=data.pos)
        return self.head(global_mean_pool(x, data.batch))


print(tuple(Model()(data).shape))

# %%
# Checking equivariance
# ---------------------
#
# Translations of a graph change no output, because positions enter through differences only. The errors below are those of
# features in float64, with near pairs (``"window"``) and with the two kinds of relative positions in the paper, for one draw of
# the random features:

for position in ("window", "clipped", "sinusoid"):
    options = {"position": position, "cutoff": 4, "method": "features"}
    layer, nodes = RelativePerformerConv(1, 16, heads=4, **options).double(), data.x.double()
    here, there = data.pos.double(), data.pos.double() + torch.tensor([5.0, -3.0])
    with torch.no_grad():
        expected = layer(nodes, data.edge_index, data.batch, pos=here)
        moved = layer(nodes, data.edge_index, data.batch, pos=there)
    print(f"{position:9} {((moved - expected).abs().max() / expected.abs().max()).item():.0e}")

# %%
# Near pairs and ``"clipped"`` are exact for every draw. ``"sinusoid"`` is exact only in expectation over draws.
#
# Feature maps of an image and of the moved image
# -----------------------------------------------
#
# A digit, and the same digit moved four pixels to the right and two down. The maps show one channel in the last block of an
# untrained model, :class:`~tg_equiattn.nn.RelativePerformer` on the pixels of the image. With near pairs the map moves with the
# digit. If the coordinates of pixels are channels of the input, as is usual, it changes.

canvas = torch.zeros(1, 20, 20)
canvas[0, 3:11, 3:11] = images[5, 0]
moved = canvas.roll((2, 4), (1, 2))


coordinates = torch.stack(torch.meshgrid(*2 * [torch.linspace(0, 1, 20)], indexing="ij"))


def made(position, **options):
    options |= {"channels": 16, "num_layers": 2, "heads": 4, "cutoff": 4}
    channels = 3 if position is None else 1
    return RelativePerformer(channels, 10, position=position, **options).double().eval()


def channel(model, image):
    seen = []
    hook = model.blocks[-1].register_forward_hook(lambda block, inputs, out: seen.append(out))
    with torch.no_grad():
        model((image if model.position else torch.cat([image, coordinates]))[None].double())
    hook.remove()
    return seen[0][0].T.unflatten(1, (20, 20))[2]


figure, axes = plt.subplots(2, 4, figsize=(8, 4), layout="constrained")
for line, position in zip(axes, ("window", None), strict=True):
    model = made(position)
    first, second = channel(model, canvas), channel(model, moved)
    shift = (second - first.roll((2, 4), (0, 1))).abs()[6:-4, 8:-4]  # where no border is near
    pictures = [canvas[0], first, moved[0], second]
    off = shift.max() / (first.max() - first.min())
    name = "near pairs" if position else "coordinates"
    titles = ["image", f"features, {name}", "image, moved", f"its features: off by {off:.0e}"]
    for axis, picture, title in zip(line, pictures, titles, strict=True):
        axis.imshow(picture, cmap="gray" if title.startswith("image") else "viridis")
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
plt.show()

# %%
# Pixels near the border have fewer neighbors, as in a convolution with padding, so the difference is measured in the middle.
# ``periodic=True``, of the model and of ``PixelGraph``, joins opposite borders. A roll is then exact everywhere.

model = made("window", periodic=True)
with torch.no_grad():
    first, second = (model(x[None].double()) for x in (canvas, moved))
print(f"on a torus: {(second - first).abs().max():.0e}")

# %%
# Random features, saving and loading
# -----------------------------------
#
# The ``state_dict()`` holds the seed of the random features and the number of the draw. So a loaded model gives the same outputs,
# and draws the same features when training continues. ``redraw_features()`` draws again. Outputs then change a little, and less
# with more features. ``redraw_features(num_random_features=256)`` changes their number, also in a trained model.

buffer = io.BytesIO()
torch.save(conv.state_dict(), buffer)
buffer.seek(0)
again = RelativePerformerConv(1, 16, heads=4, cutoff=4, method="features")
again.load_state_dict(torch.load(buffer, weights_only=True))
with torch.no_grad():
    print("the same after loading:", torch.equal(again(data.x, neighbors=grid), by_grid))
    for features in (16, 64, 256):
        torch.manual_seed(1)  # the same weights
        options = {"cutoff": 4, "num_random_features": features, "method": "features"}
        layer, drawn = RelativePerformerConv(1, 16, heads=4, **options), []
        for _ in range(20):
            layer.redraw_features()
            drawn.append(layer(data.x, neighbors=grid))
        spread = torch.stack(drawn).std(0).mean() / drawn[0].std()
        print(f"{features:3} features: outputs vary by {spread:.2%} of their spread")
