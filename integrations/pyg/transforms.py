"""Transforms of data: images and volumes as graphs of pixels, and graphs of near pairs across the borders of cells."""

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from tg_equiattn import checks
from tg_equiattn.ewald.cells import Cells, cells_of
from tg_equiattn.graphs import neighbor_list
from tg_equiattn.grids import PixelGrid
from tg_equiattn.torch_state import cached

from .ewald import in_space


@functional_transform("pixel_graph")
@checks.arguments
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
        sides = max(1, len(spacing)) if isinstance(spacing, tuple | list) else 2
        PixelGrid((1,) * sides, cutoff, periodic, spacing)  # its checks
        self.cutoff, self.periodic, self.spacing = cutoff, periodic, spacing

    def grid(self, *shape: int) -> PixelGrid:
        """The grid of an image of this shape. Layers take it instead of edges and positions."""
        return PixelGrid(shape, self.cutoff, self.periodic, self.spacing)

    def forward(self, data: Data) -> Data:
        image = data.get("image") if hasattr(data, "get") else getattr(data, "image", None)
        if not isinstance(image, Tensor) or image.ndim not in (3, 4) or 0 in image.shape:
            raise ValueError(
                "data.image must be a tensor of shape (C, H, W) or (C, D, H, W) with pixels, got "
                f"{checks.shape_of(image)}; of a batch of images make one Data each"
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


def _own(shared: Tensor, device: torch.device) -> Tensor:
    """A tensor whose memory is copied when it is first written to, or by moving to the device."""
    return torch._lazy_clone(shared).to(device)


@cached(maxsize=32)
def _graph(grid: PixelGrid, dtype: torch.dtype):
    edge_index, offsets = grid.edges()
    return edge_index, offsets.to(dtype), grid.pos(dtype=dtype), torch.diag(grid.lengths.to(dtype))[None]


@functional_transform("periodic_radius_graph")
@checks.arguments
class PeriodicRadiusGraph(BaseTransform):
    r"""Joins nodes of :obj:`data.pos` that are closer than :obj:`cutoff`, across the borders of :obj:`data.cell`, too
    (functional name: :obj:`periodic_radius_graph`).

    Positions have two or three dimensions and may lie outside the cell. The rows of :obj:`cell`, :math:`(d, d)` or
    :math:`(1, d, d)`, are lattice vectors; the graph repeats along those that :obj:`data.pbc` names, three, two or
    none, by default along all that are not zero. Without :obj:`cell` it does not repeat. They replace the edges of the
    graph:

    - :obj:`edge_index` joins each pair both ways; a node is joined with its own images, and with several images of
      another node, where they are near.
    - :obj:`edge_offset` :math:`(|\mathcal{E}|, d)` is the offset of the image of the source from the target.
    - :obj:`edge_attr` :math:`(|\mathcal{E}|, 1)` is its length, which layers that pass messages take as features.
      Lengths from positions alone, as by :class:`torch_geometric.transforms.Distance`, are wrong across borders.
    - :obj:`cell` :math:`(1, d, d)` has zeros along directions that do not repeat, and :obj:`pbc` :math:`(1, d)` says
      which ones do, for graphs that do not repeat, too. So open and periodic graphs form one batch.

    Offsets and lengths are differentiable functions of :obj:`pos` and :obj:`cell`: for forces, transform positions that
    require gradients. Transforms that move :obj:`pos` alone, such as :class:`torch_geometric.transforms.RandomRotate`
    and :class:`~torch_geometric.transforms.RandomScale`, make a periodic graph wrong: move :obj:`cell`, too.

    Graphs that repeat need `vesin <https://pypi.org/project/vesin/>`_.

    Args:
        cutoff (float): Pairs at a smaller distance are joined, in the unit of :obj:`pos`.

    Raises:
        ValueError: If :obj:`cutoff` is not positive, or if :obj:`pos`, :obj:`cell` or :obj:`pbc` do not fit.
        ImportError: If a graph repeats and vesin is not installed.

    Example:
        >>> import torch
        >>> data = Data(pos=torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [9.5, 0, 0]]))
        >>> PeriodicRadiusGraph(1.5)(data)
        Data(pos=[3, 3], edge_index=[2, 2], edge_offset=[2, 3], edge_attr=[2, 1], cell=[1, 3, 3], pbc=[1, 3])
    """

    def __init__(self, cutoff: checks.Positive):
        self.cutoff = cutoff

    def forward(self, data: Data) -> Data:
        pos = data.get("pos")
        if not isinstance(pos, Tensor) or pos.ndim != 2 or pos.shape[1] not in (2, 3) or not pos.is_floating_point():
            wanted = "of floating point numbers and shape (N, 2) or (N, 3)"
            raise ValueError(f"data.pos must be a tensor {wanted}, got {checks.shape_of(pos)}")
        dim, cell, pbc = pos.shape[1], data.get("cell"), data.get("pbc")
        if dim == 2:
            cell, pbc = in_space(cell, pbc)
        cells = cells_of(cell, pbc, 1, pos)
        cells = Cells.none(1, pos.device) if cells is None else cells
        data = copy.copy(data)
        if bool(cells.periodic.any()):
            data.edge_index, shift = _across_borders(pos.detach(), cells, self.cutoff)
            source, target = pos.double()[data.edge_index]
            data.edge_offset = (source - target + shift[:, :dim]).to(pos.dtype)
        else:
            data.edge_index, data.edge_offset = neighbor_list(pos, self.cutoff)
        data.edge_attr = data.edge_offset.norm(dim=1, keepdim=True)
        data.cell = torch.where(cells.periodic[..., None], cells.vectors, 0.0)[:, :dim, :dim].to(pos.dtype)
        data.pbc = cells.periodic[:, :dim]
        return data

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}(cutoff={self.cutoff})"


def _across_borders(pos: Tensor, cells: Cells, cutoff: float) -> tuple[Tensor, Tensor]:
    """Edges of a graph that repeats, and the lattice vectors by which their sources are shifted. They follow the cell
    where it is differentiated."""
    try:
        import vesin
    except ImportError as error:
        raise ImportError("PeriodicRadiusGraph needs vesin for graphs that repeat: pip install vesin") from error
    pos, box = torch.nn.functional.pad(pos, (0, 3 - pos.shape[1])), cells.vectors.detach()
    box = torch.where(cells.periodic[..., None], box, cells.normals().detach())[0]
    target, source, steps = (
        torch.as_tensor(x, device=pos.device)
        for x in vesin.NeighborList(cutoff=cutoff, full_list=True).compute(
            pos.double().cpu().numpy(), box.cpu().numpy(), cells.periodic[0].cpu().numpy(), "ijS"
        )
    )
    return torch.stack([source, target]).long(), steps.double() @ cells.vectors[0]
