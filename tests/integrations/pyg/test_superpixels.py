"""Graphs of superpixels are what the segmentation says."""

import math
import pickle
import sys

import pytest
import torch
from tg_equiattn.integrations.pyg import PixelGraph, RelativeGPSBlock, Superpixels
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader


def smooth(channels, height, width):
    """An image with structure: on noise SLIC merges most segments."""
    coarse = torch.rand(1, channels, 4, 4)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    image = smooth(3, 23, 29)
    return image, Superpixels(41, k=5, add_seg=True)(Data(image=image))


def test_nodes_are_means_over_segments(graph):
    """Intensities and places, x right and y up, against a loop over labels."""
    image, data = graph
    assert data.seg.shape == (1, 23, 29)
    assert data.seg.unique().tolist() == list(range(data.num_nodes))
    assert 30 < data.num_nodes < 55
    for label in range(data.num_nodes):
        rows, columns = (data.seg[0] == label).nonzero().T
        torch.testing.assert_close(data.x[label], image[:, rows, columns].mean(1))
        place = torch.stack([columns.float().mean(), 22 - rows.float().mean()])
        torch.testing.assert_close(data.pos[label], place)


def test_edges_are_the_nearest(graph):
    """Against all distances; sorted by target, nearest first, from other nodes."""
    _, data = graph
    source, target = data.edge_index
    assert target.tolist() == [node for node in range(data.num_nodes) for _ in range(5)]
    assert bool((source != target).all())
    distances = torch.cdist(data.pos.double(), data.pos.double()).fill_diagonal_(math.inf)
    wanted = distances.sort(1).values[:, :5]
    torch.testing.assert_close(distances[target, source].view(-1, 5), wanted)
    assert data.edge_index.unique(dim=1).shape == data.edge_index.shape
    assert "edge_attr" not in data
    assert "edge_offset" not in data


def test_segments_at_one_place():
    """Rings have one centroid: every point gets k others, and never itself."""
    from tg_equiattn.integrations.pyg.superpixels import nearest_edges

    pos = torch.tensor([[1.0, 2.0]] * 7 + [[3.0, 5.0]])
    source, target = nearest_edges(pos.numpy(), 3)
    assert target.tolist() == [node for node in range(8) for _ in range(3)]
    assert bool((source != target).all())
    assert bool((source[target < 7] < 7).all())


def test_segments_follow_the_image():
    """Two halves of different intensity: no segment lies in both."""
    image = torch.zeros(1, 20, 20)
    image[..., 7:] = 1
    data = Superpixels(16)(Data(image=image))
    assert sorted(data.x.unique().tolist()) == [0, 1]


def test_moved_images():
    """A move by the step of the grid of seeds moves nodes; by another, segments differ, as SLIC has them."""
    image, transform = torch.zeros(1, 40, 40), Superpixels(64)  # seeds every 5 pixels
    image[:, 15:25, 15:25] = torch.rand(1, 10, 10) + 0.1

    def bright(image):
        data = transform(Data(image=image))
        here = data.x[:, 0] > 0
        return torch.cat([data.x, data.pos], 1)[here]

    nodes, moved = bright(image), bright(image.roll((-5, 5), (1, 2)))
    wanted = nodes + torch.tensor([0.0, 5.0, 5.0])
    order, others = wanted[:, 0].argsort(), moved[:, 0].argsort()
    torch.testing.assert_close(moved[others], wanted[order])
    assert len(nodes) > 3


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 7), (2, 3, 2)])
@pytest.mark.parametrize("fill", [torch.zeros, torch.ones, torch.rand])
def test_small_and_constant_images(shape, fill):
    """Fewer pixels than segments: every pixel is one, as PixelGraph has it."""
    image = fill(shape)
    data, pixels = Superpixels()(Data(image=image)), PixelGraph()(Data(image=image))
    n = shape[1] * shape[2]
    assert data.edge_index.shape == (2, n * min(8, n - 1))
    torch.testing.assert_close(data.x, pixels.x)
    torch.testing.assert_close(data.pos, pixels.pos)
    constant = Superpixels(9)(Data(image=fill(1, 12, 12)[:, :1, :1].expand(1, 12, 12)))
    assert constant.num_nodes == 9
    assert float(constant.x.std()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float64, torch.float16])
def test_types(dtype):
    image = (smooth(1, 9, 11) * 200).to(torch.uint8)
    image = image > 100 if dtype == torch.bool else image.to(dtype)
    data = Superpixels(20)(Data(image=image))
    assert data.x.dtype == (dtype if dtype.is_floating_point else torch.get_default_dtype())
    assert data.pos.dtype == torch.get_default_dtype()
    largest = float(image.max()) / (255 if dtype == torch.uint8 else 1)
    assert largest / 2 < float(data.x.max()) <= largest


def test_input_is_left_alone():
    image = smooth(1, 9, 11)
    data, kept = Data(image=image, y=torch.tensor([2]), name="digit"), image.clone()
    out = Superpixels(20)(data)
    assert torch.equal(data.image, kept)
    assert "x" not in data
    assert "image" not in out
    assert "seg" not in out
    assert out.y is data.y
    assert out.name == "digit"
    again = pickle.loads(pickle.dumps(Superpixels(20)))(data)
    assert torch.equal(out.x, again.x)
    assert torch.equal(out.edge_index, again.edge_index)
    assert repr(Superpixels(20)) == "Superpixels(num_segments=20, k=8, compactness=0.1)"


def test_batches_in_a_layer():
    """Alone equals in a batch of a loader; moved positions change nothing, nor do turned ones to distances."""
    graphs = [Superpixels(20, k=4)(Data(image=smooth(3, *shape))) for shape in ((11, 13), (1, 1), (7, 17))]
    (batch,) = DataLoader(graphs, batch_size=3)
    attention = {"offset": "distance", "max_distance": 6.0, "values": "offset"}
    block = RelativeGPSBlock(3, None, attn_kwargs=attention).double().eval()

    def out(data, pos, index=None):
        return block(data.x.double(), data.edge_index, index, pos=pos.double())

    together = out(batch, batch.pos, batch.batch)
    for number, graph in enumerate(graphs):
        torch.testing.assert_close(together[batch.batch == number], out(graph, graph.pos))
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    torch.testing.assert_close(out(batch, batch.pos.double() @ turn + 7, batch.batch), together)
    assert float((out(batch, 2 * batch.pos, batch.batch) - together).abs().max().detach()) > 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_segments": 0}, "num_segments must be a positive integer, got 0"),
        ({"num_segments": 7.5}, "num_segments must be a positive integer, got 7.5"),
        ({"k": 0}, "k must be a positive integer, got 0"),
        ({"compactness": 0.0}, "compactness must be a positive number, got 0.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Superpixels(**options)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, r"data.image must be a tensor of shape \(C, H, W\) with pixels, got NoneType"),
        (torch.rand(5, 7), r"got \(5, 7\)"),
        (torch.rand(3, 0, 7), r"got \(3, 0, 7\)"),
        (torch.rand(2, 3, 5, 7), "for a batch of images make one Data of each"),
        (torch.full((1, 5, 7), math.nan), "data.image must be finite, got NaN or infinite pixels"),
        (torch.full((1, 5, 7), math.inf), "data.image must be finite"),
        (torch.rand(1, 5, 7).to(torch.complex64), "data.image must be real, got torch.complex64"),
    ],
)
def test_bad_images(image, message):
    with pytest.raises(ValueError, match=message):
        Superpixels()(Data(image=image))


def test_without_scikit_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(ImportError, match=r"Superpixels needs scikit-image.*pip install 'scikit-image>=0.22'"):
        Superpixels()
