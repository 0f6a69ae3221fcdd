"""Images and volumes as graphs of pixels."""

import copy

import torch
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from tg_equiattn.checks import python_numbers, shape_of
from tg_equiattn.grids import PixelGrid
from tg_equiattn.modes import cached


@functional_transform("pixel_graph")
@python_numbers
class PixelGraph(BaseTransform):
    r"""Makes a graph of pixels of :obj:`data.image`, of shape :math:`(C, H, W)`, or of voxels, :math:`(C, D, H, W)`
    (functional name: :obj:`pixel_graph`).

    Pixels in row order become nodes with features :obj:`x` of shape :math:`(H W, C)` and positions :obj:`pos` (x right
    and y up; x, y and z for voxels). Pixels closer than :obj:`cutoff` are joined both ways. The image itself is
    removed. 8-bit intensities become numbers in :math:`[0, 1]`; other integers become floating point numbers of the
    same value. Graphs of equal shape share the memory of edges and positions until one of them is written to; the
    others then stay as they are.

    Args:
        cutoff (float, optional): Pixels at a smaller Manhattan distance are joined, in the unit of :obj:`pos`.
            (default: :obj:`6`)
        periodic (bool, optional): If set to :obj:`True`, opposite borders of the image touch. The offset
            :math:`\mathbf{p}_j - \mathbf{p}_i` of source j from target i, the shortest one, is then in
            :obj:`edge_offset`, and the periods are in :obj:`cell`, of shape :math:`(1, d, d)`. Pass both to layers,
            which refuse offsets that a later transform has made wrong. (default: :obj:`False`)
        spacing (float or tuple, optional): Distance of neighboring pixels: one number, or one for each axis of the
            image, in order. Layers with tables of offsets need :obj:`1`. (default: :obj:`1`)

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one.

    Example:
        >>> import torch
        >>> PixelGraph(cutoff=2)(Data(image=torch.rand(3, 4, 5)))
        Data(edge_index=[2, 62], x=[20, 3], pos=[20, 2])
    """

    def __init__(self, cutoff: float = 6, *, periodic: bool = False, spacing: float | tuple[float, ...] = 1):
        sides = len(spacing) if isinstance(spacing, tuple | list) else 2
        PixelGrid((1,) * sides, cutoff, periodic, spacing)  # its checks
        self.cutoff, self.periodic, self.spacing = cutoff, periodic, spacing

    def grid(self, *shape: int) -> PixelGrid:
        """The grid of an image of this shape. Layers take it instead of edges and positions."""
        return PixelGrid(shape, self.cutoff, self.periodic, self.spacing)

    def forward(self, data: Data) -> Data:
        image = data.get("image") if hasattr(data, "get") else getattr(data, "image", None)
        if not isinstance(image, torch.Tensor) or image.ndim not in (3, 4) or 0 in image.shape:
            raise ValueError(
                f"data.image must be a tensor of shape (C, H, W) or (C, D, H, W) with pixels, got {shape_of(image)}; "
                "of a batch of images make one Data each"
            )
        data = copy.copy(data)
        grid = self.grid(*image.shape[1:])
        edge_index, offsets, pos, cell = _graph(grid, torch.get_default_dtype())
        data.edge_index = _own(edge_index, image.device)
        if self.periodic:
            data.edge_offset, data.cell = _own(offsets, image.device), _own(cell, image.device)
        if not (image.is_floating_point() or image.is_complex()):
            image = image.to(torch.get_default_dtype()) / (255 if image.dtype == torch.uint8 else 1)
        data.x = image.flatten(1).T.clone(memory_format=torch.contiguous_format)  # shares no memory with the image
        data.pos = _own(pos, image.device)
        del data.image
        return data

    def __repr__(self) -> str:
        spacing = "" if self.spacing == 1 else f", spacing={self.spacing}"
        return f"{self.__class__.__name__}(cutoff={self.cutoff}, periodic={self.periodic}{spacing})"


def _own(shared: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor whose memory is copied when it is first written to, or by moving to the device."""
    return torch._lazy_clone(shared).to(device)


@cached(maxsize=32)
def _graph(grid: PixelGrid, dtype: torch.dtype):
    edge_index, offsets = grid.edges()
    return edge_index, offsets.to(dtype), grid.pos(dtype=dtype), torch.diag(grid.lengths.to(dtype))[None]
