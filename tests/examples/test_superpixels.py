"""Graphs of superpixels are what the segmentation says."""

import math

import pytest
import torch
from torch_geometric.data import Data

Superpixels = pytest.importorskip("data.superpixels").Superpixels


@pytest.fixture(scope="module")
def graph():
    """Of an image with structure: on noise SLIC merges most segments."""
    torch.manual_seed(0)
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4), (23, 29), mode="bilinear")[0]
    return image, Superpixels(41, k=5)(Data(image=image))


def test_nodes_are_means_over_segments(graph):
    """Means of all nodes, weighed by how many pixels they have, are those of the image; places are within it."""
    image, data = graph
    assert 30 < data.num_nodes < 55
    assert data.x.dtype == data.pos.dtype == torch.float32
    assert bool((data.pos >= 0).all() and (data.pos <= torch.tensor([28.0, 22.0])).all())
    pixel = image[:, (22 - data.pos[:, 1]).round().long(), data.pos[:, 0].round().long()].T
    assert float((pixel - data.x).abs().mean()) < 0.05


def test_edges_are_the_nearest(graph):
    """Against all distances; sorted by target, nearest first, from other nodes."""
    _, data = graph
    source, target = data.edge_index
    assert target.tolist() == [node for node in range(data.num_nodes) for _ in range(5)]
    distances = torch.cdist(data.pos.double(), data.pos.double()).fill_diagonal_(math.inf)
    torch.testing.assert_close(distances[target, source].view(-1, 5), distances.sort(1).values[:, :5])


def test_segments_follow_the_image():
    """Two halves of different intensity: no segment lies in both; y is up."""
    image = torch.zeros(1, 20, 20)
    image[:, 7:] = 1
    data = Superpixels(16)(Data(image=image))
    assert sorted(data.x.unique().tolist()) == [0, 1]
    assert float(data.pos[data.x[:, 0] == 1, 1].max()) < float(data.pos[data.x[:, 0] == 0, 1].min())
