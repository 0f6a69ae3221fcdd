"""Images as graphs of pixels."""

import copy
import functools

import torch
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from tg_equiattn.grids import PixelGrid


@functional_transform("pixel_graph")
class PixelGraph(BaseTransform):
    r"""Makes a graph of pixels of :obj:`data.image`, of shape :math:`(C, H, W)` (functional name: :obj:`pixel_graph`).

    Pixels in row order become nodes with features :obj:`x` of shape :math:`(H W, C)` and positions :obj:`pos`, x right
    and y up; pixels closer than :obj:`max_distance` are joined both ways, with the offset
    :math:`\mathbf{p}_j - \mathbf{p}_i` of source j from target i in :obj:`edge_attr`. The image itself is left out.
    Edges and positions are computed once for each shape and shared by all graphs of it, and :obj:`x` is a view of the
    image: do not write into them.

    Args:
        max_distance (float, optional): Pixels at a smaller Manhattan distance are joined. (default: :obj:`6`)
        periodic (bool, optional): If set to :obj:`True`, opposite borders of the image touch, and offsets are the
            shortest ones. (default: :obj:`False`)

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> PixelGraph(max_distance=2)(Data(image=torch.rand(3, 4, 5)))
        Data(edge_index=[2, 62], edge_attr=[62, 2], x=[20, 3], pos=[20, 2])
    """

    def __init__(self, max_distance: float = 6, periodic: bool = False):
        PixelGrid((1, 1), max_distance, periodic)  # its checks
        self.max_distance, self.periodic = max_distance, periodic

    def grid(self, height: int, width: int) -> PixelGrid:
        """The grid of an image's shape, which layers take in place of edges and positions."""
        return PixelGrid((height, width), self.max_distance, self.periodic)

    def forward(self, data: Data) -> Data:
        image = data.get("image") if hasattr(data, "get") else getattr(data, "image", None)
        if not isinstance(image, torch.Tensor) or image.ndim != 3 or 0 in image.shape:
            what = tuple(image.shape) if isinstance(image, torch.Tensor) else type(image).__name__
            raise ValueError(f"data.image must be a tensor of shape (C, H, W) with pixels, got {what}")
        data = copy.copy(data)
        grid = self.grid(*image.shape[1:])
        edge_index, offsets, pos = _graph(grid, torch.get_default_dtype())
        data.edge_index, data.edge_attr = edge_index.to(image.device), offsets.to(image.device)
        data.x, data.pos = image.flatten(1).T, pos.to(image.device)
        del data.image
        return data

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}(max_distance={self.max_distance}, periodic={self.periodic})"


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _graph(grid: PixelGrid, dtype: torch.dtype):
    edge_index, offsets = grid.edges()
    return edge_index, offsets.to(dtype), grid.pos(dtype=dtype)
