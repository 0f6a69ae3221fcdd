"""Graphs of near pairs across the borders of cells."""

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from tg_equiattn import checks
from tg_equiattn.functional.waves.cells import Cells, cells_of
from tg_equiattn.neighbors import neighbor_list

from .ewald import in_space


@functional_transform("periodic_radius_graph")
@checks.python_numbers
class PeriodicRadiusGraph(BaseTransform):
    r"""Joins nodes of :obj:`data.pos` that are closer than :obj:`cutoff`, across the borders of :obj:`data.cell`, too
    (functional name: :obj:`periodic_radius_graph`).

    Positions have two or three dimensions and may lie outside the cell. The rows of :obj:`cell`, :math:`(d, d)` or
    :math:`(1, d, d)`, are lattice vectors; the graph repeats along those that :obj:`data.pbc` names, by default along
    all that are not zero. Without :obj:`cell` it does not repeat. They replace the edges of the graph:

    - :obj:`edge_index` joins each pair both ways; a node is joined with its own images, and with several images of
      another node, where they are near.
    - :obj:`edge_offset` :math:`(|\mathcal{E}|, d)` is the offset of the image of the source from the target.
    - :obj:`edge_attr` :math:`(|\mathcal{E}|, 1)` is its length, which layers that pass messages take as features.
      Lengths from positions alone, as by :class:`torch_geometric.transforms.Distance`, are wrong across borders.

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
        Data(pos=[3, 3], edge_index=[2, 2], edge_offset=[2, 3], edge_attr=[2, 1])
    """

    def __init__(self, cutoff: float):
        checks.positive_number(cutoff=cutoff)
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
        data = copy.copy(data)
        if cells is None or not bool(cells.periodic.any()):
            data.edge_index, offsets = neighbor_list(pos, self.cutoff)
        else:
            space = torch.nn.functional.pad(pos, (0, 3 - dim))
            data.edge_index, offsets = _across_borders(space.detach(), cells, self.cutoff)
        data.edge_offset = offsets[:, :dim].to(pos)
        data.edge_attr = data.edge_offset.norm(dim=1, keepdim=True)
        return data

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}(cutoff={self.cutoff})"


def _across_borders(pos: Tensor, cells: Cells, cutoff: float) -> tuple[Tensor, Tensor]:
    """Edges and offsets of a graph that repeats."""
    try:
        import vesin
    except ImportError as error:
        raise ImportError("PeriodicRadiusGraph needs vesin for graphs that repeat: pip install vesin") from error
    box = torch.where(cells.periodic[..., None], cells.vectors, cells.normals())[0]
    target, source, offsets = (
        torch.as_tensor(x, device=pos.device)
        for x in vesin.NeighborList(cutoff=cutoff, full_list=True).compute(
            pos.double().cpu().numpy(), box.cpu().numpy(), cells.periodic[0].cpu().numpy(), "ijD"
        )
    )
    return torch.stack([source, target]).long(), offsets
