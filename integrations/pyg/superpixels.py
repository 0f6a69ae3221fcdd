"""Images as graphs of superpixels."""

import copy
import importlib

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from tg_equiattn import checks

from .pixel_graph import image_of, intensities


@functional_transform("superpixels")
class Superpixels(BaseTransform):
    r"""Makes a graph of superpixels of :obj:`data.image`, of shape :math:`(C, H, W)`, by the SLIC algorithm of
    scikit-image (functional name: :obj:`superpixels`).

    Segments become nodes: :obj:`x` of shape :math:`(N, C)` is the mean of each segment's pixels, and :obj:`pos` of
    shape :math:`(N, 2)` the mean of their positions, in pixels, x right and y up from the centre of the lower left
    pixel, as :class:`PixelGraph` has them. Edges lead to every node from its :obj:`k` nearest others, nearest first and
    sorted by target; their offsets are differences of :obj:`pos`. The image itself is
    left out. Features are floating point: 8-bit intensities become numbers in :math:`[0, 1]`, other integers stay as
    large as they are. Seeds of segments lie on a grid of the whole image, so an image that is moved by a part of the
    grid's step is cut otherwise.

    Args:
        num_segments (int, optional): About so many nodes: SLIC may find some fewer or more. (default: :obj:`75`)
        k (int, optional): The number of neighbors; of an image of fewer segments all others. (default: :obj:`8`)
        compactness (float, optional): The weight of places against intensities, which are scaled to :math:`[0, 1]`:
            large values make segments square, small ones let them follow the image. (default: :obj:`0.1`)
        add_seg (bool, optional): If set to :obj:`True`, the segment of every pixel comes as :obj:`seg` of shape
            :math:`(1, H, W)`. (default: :obj:`False`)

    Raises:
        ValueError: naming the argument, what came and what is allowed.
        ImportError: where scikit-image is missing, when the transform is constructed.

    Source:
        Achanta et al., `"SLIC Superpixels Compared to State-of-the-art Superpixel Methods"
        <https://doi.org/10.1109/TPAMI.2012.120>`_, as in :class:`torch_geometric.transforms.ToSLIC`, which has y down
        and no edges.

    Example:
        >>> import torch
        >>> Superpixels(num_segments=75)(Data(image=torch.zeros(1, 28, 28)))
        Data(edge_index=[2, 648], x=[81, 1], pos=[81, 2])
    """

    def __init__(self, num_segments: int = 75, k: int = 8, compactness: float = 0.1, add_seg: bool = False):
        checks.positive(num_segments=num_segments, k=k)
        checks.positive_number(compactness=compactness)
        _require()
        self.num_segments, self.k, self.compactness, self.add_seg = num_segments, k, compactness, add_seg

    def forward(self, data: Data) -> Data:
        image = image_of(data, (3,), "(C, H, W)")
        if image.is_complex():
            raise ValueError(f"data.image must be real, got {image.dtype}")
        image = intensities(image)
        if not bool(image.isfinite().all()):
            raise ValueError("data.image must be finite, got NaN or infinite pixels")
        data = copy.copy(data)
        pixels = image.detach().double().cpu()
        segments = self._segments(pixels)
        count = int(segments.max()) + 1
        size = segments.flatten().bincount(minlength=count).double()

        def mean(values: torch.Tensor) -> torch.Tensor:  # (H W, D) to (N, D)
            return values.new_zeros(count, values.shape[1]).index_add_(0, segments.flatten(), values) / size[:, None]

        height, width = segments.shape
        y, x = torch.meshgrid(torch.arange(height - 1, -1, -1), torch.arange(width), indexing="ij")
        pos = mean(torch.stack([x, y], -1).flatten(0, 1).double())
        data.edge_index = nearest_edges(pos.numpy(), self.k).to(image.device)
        data.x = mean(pixels.flatten(1).T).to(image)
        data.pos = pos.to(image.device, torch.get_default_dtype())
        if self.add_seg:
            data.seg = segments[None].to(image.device)
        data.edge_attr = data.edge_offset = None
        del data.image
        return data

    def _segments(self, pixels: torch.Tensor) -> torch.Tensor:
        """The segment (H, W) of every pixel of an image (C, H, W), from 0 without gaps."""
        found = _require().slic(
            pixels.permute(1, 2, 0).contiguous().numpy(), n_segments=self.num_segments, compactness=self.compactness,
            convert2lab=False, start_label=0, channel_axis=-1,
        )  # fmt: skip
        return torch.from_numpy(np.asarray(found, dtype=np.int64)).unique(return_inverse=True)[1]

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}(num_segments={self.num_segments}, k={self.k}, compactness={self.compactness})"
        )


def _require():
    try:
        return importlib.import_module("skimage.segmentation")
    except ImportError as error:
        raise ImportError(
            f"Superpixels needs scikit-image, which failed to import ({error}); install it with: "
            "pip install 'scikit-image>=0.22'"
        ) from error


def nearest_edges(pos: np.ndarray, k: int) -> torch.Tensor:
    """Edges (2, N min(k, N - 1)) to every point from those nearest to it, sorted by target."""
    from scipy.spatial import KDTree  # scikit-image needs it too

    nodes = np.arange(len(pos))
    found = KDTree(pos).query(pos, np.arange(1, min(k + 1, len(pos)) + 1))[1]
    other = found != nodes[:, None]
    other[other.all(1), -1] = False  # points at one place may hide a point from itself
    source = found[other].astype(np.int64)
    target = np.repeat(nodes, found.shape[1] - 1)
    return torch.from_numpy(np.stack([source, target]))
