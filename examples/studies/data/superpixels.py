"""Images as graphs of superpixels: torch_geometric.transforms.ToSLIC with y up, and with edges."""

import numpy as np
import torch
from scipy.spatial import KDTree
from skimage.segmentation import slic
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform


class Superpixels(BaseTransform):
    """Makes a graph of the SLIC segments of ``data.image`` (C, H, W), floating point.

    ``x`` (N, C) is the mean of each segment's pixels, ``pos`` (N, 2) that of their positions, in pixels from the centre
    of the lower left one; ``edge_index`` leads to every node from its ``k`` nearest others, sorted by target. About
    ``num_segments`` nodes: SLIC may find some fewer or more.
    """

    def __init__(self, num_segments: int = 75, k: int = 8):
        self.num_segments, self.k = num_segments, k

    def forward(self, data: Data) -> Data:
        pixels = data.image.double()
        found = slic(
            pixels.permute(1, 2, 0).contiguous().numpy(), n_segments=self.num_segments, compactness=0.1,
            convert2lab=False, start_label=0, channel_axis=-1,
        )  # fmt: skip
        segments = torch.from_numpy(found.astype(np.int64)).unique(return_inverse=True)[1]
        size = segments.flatten().bincount().double()

        def mean(values: torch.Tensor) -> torch.Tensor:  # (H W, D) to (N, D)
            sums = values.new_zeros(len(size), values.shape[1]).index_add_(0, segments.flatten(), values)
            return sums / size[:, None]

        height, width = segments.shape
        y, x = torch.meshgrid(torch.arange(height - 1, -1, -1), torch.arange(width), indexing="ij")
        pos = mean(torch.stack([x, y], -1).flatten(0, 1).double())
        data.edge_index, data.pos = nearest_edges(pos, self.k), pos.float()
        data.x = mean(pixels.flatten(1).T).to(data.image)
        del data.image
        return data


def nearest_edges(pos: torch.Tensor, k: int) -> torch.Tensor:
    """Edges (2, N min(k, N - 1)) to every point from those nearest to it, nearest first, sorted by target."""
    nodes = np.arange(len(pos))
    found = KDTree(pos.numpy()).query(pos.numpy(), np.arange(1, min(k + 1, len(pos)) + 1))[1]
    other = found != nodes[:, None]
    other[other.all(1), -1] = False  # points at one place may hide a point from itself
    source = found[other].astype(np.int64)
    return torch.from_numpy(np.stack([source, np.repeat(nodes, found.shape[1] - 1)]))
