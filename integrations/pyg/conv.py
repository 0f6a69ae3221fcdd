"""Performer attention with relative positions as message passing, and the checks that all layers of PyG share."""

import copy
import inspect
import warnings
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data.data import BaseData
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj, OptTensor, SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from tg_equiattn import checks
from tg_equiattn.graphs import NeighborList
from tg_equiattn.graphs.edges import (
    check_between,
    check_edges,
    check_fields,
    images_of,
    of_edges,
    offsets_along,
    offsets_between,
    whole_offsets,
)
from tg_equiattn.grids import PixelGrid
from tg_equiattn.linear.attention import Method, Offset, PositionName, Values
from tg_equiattn.linear.nodes import NO_FAR_OFFSETS, Needs, read_pos
from tg_equiattn.linear.random_features import DrawsFeatures
from tg_equiattn.modules import NotScriptable, StoresSettings
from tg_equiattn.nn import PerformerAttention
from tg_equiattn.torch_state import is_readable

_HOOKS = [f"_{part}_forward{kind}_hooks" for part in ("propagate", "message", "aggregate") for kind in ("_pre", "")]
ONE_SET = "attention is among the nodes of one set; bipartite graphs have two"


class WarnsOfHiddenBatch:
    """A layer that warns if the batch index of its first graphs was not passed."""

    _guessed_batch = False

    def warn_of_hidden_batch(self, edge_index: Adj, nodes: int) -> None:
        """Warn in the first call if nodes come in several blocks that no edge leaves. They may be a batch of graphs
        whose batch index was not passed, or one graph of several parts."""
        if self._guessed_batch:
            return
        edge_index, _ = plain_edges(edge_index, None, nodes)
        if is_readable(edge_index):
            self._guessed_batch = True
            _warn_of_blocks(edge_index, nodes)


class RelativePerformerConv(WarnsOfHiddenBatch, NotScriptable, DrawsFeatures, StoresSettings, MessagePassing):
    r"""Global attention over the nodes of each graph in linear time, with relative positions; after the
    `"Translational Equivariance in Kernelizable Attention" <https://arxiv.org/abs/2102.07680>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_o \frac{\sum_j w_{ij} \mathbf{v}_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^{a_j} \big(e^f \langle \phi(\mathbf{q}_i), \phi(\mathbf{k}_j) \rangle
        + [(j, i) \in \mathcal{E} \text{ or } j = i]
        \exp(\langle \mathbf{q}_i, \mathbf{k}_j \rangle / \sqrt{d} + b(\mathbf{p}_j - \mathbf{p}_i))\big)

    Near pairs (the edges) have exact softmax weights with a bias :math:`b` of their offset, and all pairs are reached
    through random features :math:`\phi`. The bias :math:`a_j` of a key, a linear map of its input, is the part
    of the scores that is the same for all queries; there is none with :obj:`method="pairs"`. These are the weights of
    :obj:`position="window"`. The other kinds of positions are:

    - :obj:`"clipped"` (strategy 2): half of the heads have weights :math:`\langle \phi(\mathbf{q}_i),
      \phi(\mathbf{w}_{d(i,j)}) \rangle` with a learned table :math:`\mathbf{w}` over the Manhattan distance :math:`d`,
      at most :obj:`cutoff`; the others have no positions. Pairs that are not edges have the distance :obj:`cutoff`.
    - :obj:`"sinusoid"` (strategy 1): channels are added to queries and keys whose products depend on relative positions
      only. Edges are not used.
    - :obj:`None`: no positions. Edges are not used.

    Outputs stay equal when all positions of a graph are translated: for every draw of the random features, but with
    :obj:`"sinusoid"` in expectation over draws only, or exactly with :obj:`method="pairs"`.

    With :obj:`position="window"`, near pairs are messages where the layer is explained, for example by
    :class:`~torch_geometric.explain.GNNExplainer` or :class:`~torch_geometric.explain.AttentionExplainer`, or has a
    hook of messages. Masks of edges multiply near weights. Otherwise sparse products run, which are faster.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size from the first input.
        out_channels (int): Size of each output sample, a multiple of :obj:`heads`.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        position (str, optional): Kind of positions: :obj:`"window"`, :obj:`"clipped"`, :obj:`"sinusoid"` or
            :obj:`None`, see above. Use the default unless you reproduce the paper or your nodes have no positions.
            (default: :obj:`"window"`)
        pos_dim (int, optional): Dimension of positions. (default: :obj:`2`)
        cutoff (float, optional): Pairs closer than this are near where there are no edges, in the unit of :obj:`pos`.
            Offsets are measured in units of it, too. It is a whole number for :obj:`offset="table"` and
            :obj:`position="clipped"`, where distances are Manhattan, and a real number otherwise, where they are
            Euclidean. Twice :func:`tg_equiattn.graphs.mean_edge_length` suits most graphs. :obj:`None` means :obj:`6`,
            but :obj:`offset="mlp"` and :obj:`"distance"` need a value, and with :obj:`offset=None` it must be
            :obj:`None`. (default: :obj:`None`)
        offset (str, optional): Bias of near pairs: a :obj:`"table"` over whole offsets, for grids; an :obj:`"mlp"` of
            the offset, for points off a grid; a smooth function of the :obj:`"distance"`, which is invariant to
            rotations and vanishes at :obj:`cutoff`; or :obj:`None`, one number for each head, for edges between nodes
            without positions. Only for :obj:`position="window"`; but with :obj:`position=None`, :obj:`"distance"` makes
            the far offsets of :obj:`values` invariant to rotations. (default: :obj:`"table"`)
        values (str, optional): :obj:`"content"`; :obj:`"offset"` to attend to the offsets of all nodes, too, and to add
            a function of the offset to the values of near pairs; or :obj:`"far"` for the offsets of all nodes alone,
            which is faster. Use :obj:`"offset"` where outputs depend on where other nodes are, and :obj:`"far"` if
            messages run along the near pairs already. Only for :obj:`position="window"` and :obj:`None`, which has no
            near pairs. (default: :obj:`"content"`)
        key_channels (int, optional): Size of the queries and keys of each head. Few channels make random features much
            more exact, and attention can then be sharp; use about the number of properties by which nodes choose each
            other. :obj:`None` means at most :obj:`3` with :obj:`method="features"` and :obj:`position="window"` or
            :obj:`None`, and otherwise as many as values have, :obj:`out_channels // heads`. (default: :obj:`None`)
        edge_dim (int, optional): Number of features of an edge. A linear map of them is added to its score. Only for
            :obj:`position="window"`. (default: :obj:`None`)
        num_random_features (int, optional): Number of random features. More are more exact and slower. Their directions
            come in opposite pairs and have a variance that each head learns. :obj:`None` means :math:`\max(64, \lfloor
            d \ln d \rfloor)` with :math:`d` the :obj:`key_channels`. (default: :obj:`None`)
        method (str, optional): :obj:`"features"`, in linear time, or :obj:`"pairs"`, exact over all pairs of a graph,
            in quadratic time; use it for graphs of up to some hundred nodes. The two are different functions: a trained
            layer keeps its method. :obj:`None` means :obj:`"features"`, with one warning if the first graphs are so
            small that pairs are exact and faster. (default: :obj:`None`)
        dropout (float, optional): Probability of dropping weights in training: single ones of near pairs, and of all
            pairs with :obj:`method="pairs"`; whole keys of random features. (default: :obj:`0.0`)
        **kwargs (optional): Additional arguments of :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`; optional edge indices :math:`(2, |\mathcal{E}|)`,
          graph indices :math:`(|\mathcal{V}|)`, edge features :math:`(|\mathcal{E}|, D)`, positions
          :math:`(|\mathcal{V}|, d)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one.

    Warns:
        UserWarning: If neither :obj:`batch` nor :obj:`ptr` is given in the first call, as by
            :class:`torch_geometric.nn.GPSConv` without :obj:`ptr=data.ptr`, and nodes come in blocks that no edge
            joins.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from tg_equiattn.integrations.pyg import PixelGraph
        >>> transform = PixelGraph(cutoff=4)
        >>> data = Batch.from_data_list([transform(Data(image=torch.rand(3, 6, 7))) for _ in range(2)])
        >>> conv = RelativePerformerConv(3, 16, heads=4, cutoff=4, method="pairs")
        >>> conv(data.x, data.edge_index, data.batch, pos=data.pos).shape
        torch.Size([84, 16])
    """

    SUPPORTS_FUSED_EDGE_INDEX = True

    def __init__(
        self, in_channels: int, out_channels: int, heads: int = 1, *, position: PositionName | None = "window",
        pos_dim: int = 2, cutoff: float | None = None, offset: Offset | None = "table", values: Values = "content",
        key_channels: int | None = None, edge_dim: int | None = None, num_random_features: int | None = None,
        method: Method | None = None, dropout: float = 0.0, **kwargs,
    ):  # fmt: skip
        if isinstance(in_channels, tuple | list):
            raise ValueError(f"in_channels must be one number, got {in_channels!r}: {ONE_SET}")
        for name, allowed in (("aggr", ("sum", "add")), ("node_dim", (0,))):
            if kwargs.setdefault(name, allowed[0]) not in allowed:
                raise ValueError(f"{name} must be {allowed[0]!r}, got {kwargs[name]!r}")
        if unknown := kwargs.keys() - inspect.signature(MessagePassing).parameters.keys():
            own = [name for name in inspect.signature(RelativePerformerConv).parameters if name != "kwargs"]
            raise TypeError(f"{type(self).__name__} has no argument {unknown.pop()!r}; its own are {', '.join(own)}")
        super().__init__(**kwargs)
        self.attention = PerformerAttention(
            in_channels, out_channels, heads, position=position, pos_dim=pos_dim, cutoff=cutoff, offset=offset,
            values=values, key_channels=key_channels, edge_dim=edge_dim, num_random_features=num_random_features,
            method=method, dropout=dropout,
        )  # fmt: skip
        self.out_channels, self.heads = self.attention.out_channels, self.attention.heads
        if self.attention.position != "window":
            self.explain = False  # an edge has no weight of its own

    @property
    def in_channels(self) -> int:
        """Size of each input sample; -1 if it is not known yet."""
        return self.attention.in_channels

    def settings(self) -> dict[str, Any]:
        return {"flow": self.flow if self.attention.needs.neighbors else None}

    def reset_parameters(self):
        """Resets all learnable parameters of the module, and draws the random features again."""
        super().reset_parameters()
        self.attention.reset_parameters()

    def forward(
        self, x: Tensor, edge_index: Adj | None = None, batch: Tensor | None = None, edge_attr: Tensor | None = None,
        pos: Tensor | None = None, *, edge_offset: Tensor | None = None, cell: Tensor | None = None,
        ptr: Tensor | None = None, batch_size: int | None = None, max_num_nodes: int | None = None,
        neighbors: NeighborList | PixelGrid | None = None, return_vectors: bool = False,
    ) -> Any:  # fmt: skip
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features, :math:`(|\mathcal{V}|, F_{in})`; or those of several signals on one
                graph, :math:`(B, |\mathcal{V}|, F_{in})`, without :obj:`batch`.
            edge_index (torch.Tensor or SparseTensor or EdgeIndex, optional): The near pairs, in any order. Without
                it they are found from :obj:`pos`: closer than :obj:`cutoff`, at most 1,000 a node on average.
                (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph index of nodes, in any order; :obj:`None` means one graph.
                (default: :obj:`None`)
            edge_attr (torch.Tensor, optional): The edge features, with :obj:`edge_dim`. Features of self-loops belong
                to the pair of a node with itself. (default: :obj:`None`)
            pos (torch.Tensor, optional): The positions of nodes. Offsets are their differences, in their precision.
                (default: :obj:`None`)
            edge_offset (torch.Tensor, optional): Offsets :math:`\mathbf{p}_j - \mathbf{p}_i` of the edges, in a
                periodic graph or in place of :obj:`pos`. Where :obj:`pos` is given, too, they must be its differences,
                up to whole lattice vectors if :obj:`cell` is given. With :obj:`values="offset"` and :obj:`"far"` they
                must be equal to its differences. (default: :obj:`None`)
            cell (torch.Tensor, optional): The lattice vectors of periodic graphs as rows, :math:`(d, d)` or
                :math:`(|\mathcal{G}|, d, d)`, by which :obj:`edge_offset` may differ from differences of :obj:`pos`.
                (default: :obj:`None`)
            ptr (torch.Tensor, optional): Index of the first node of each graph, in place of :obj:`batch`.
                (default: :obj:`None`)
            batch_size (int, optional): The number of graphs; :meth:`torch.compile` needs it. (default: :obj:`None`)
            max_num_nodes (int, optional): Upper bound of the nodes of a graph, for :obj:`method="pairs"`;
                :meth:`torch.compile` needs it. (default: :obj:`None`)
            neighbors (NeighborList or PixelGrid, optional): Near pairs from :meth:`neighbors`, to share among layers;
                or a grid whose pixels every graph has, in place of edges, positions and :obj:`batch`.
                (default: :obj:`None`)
            return_vectors (bool, optional): If set to :obj:`True`, will additionally return the heads' mean offsets
                of :obj:`values="offset"` or :obj:`"far"`, :math:`(|\mathcal{V}|, H, d)`. (default: :obj:`False`)
        """
        check_nodes(x, self.in_channels, signals=True)
        grid = neighbors if isinstance(neighbors, PixelGrid) else None
        near = None if isinstance(neighbors, PixelGrid) else neighbors
        check_sources(edge_index, edge_attr, edge_offset, neighbors, cell)
        batch, batch_size = batch_of(batch, ptr, x.shape[-2], batch_size)
        if near is not None and batch is None:
            self.warn_of_hidden_batch(torch.stack([near.source, near.target]), x.shape[-2])
        if edge_index is not None:
            near = self._neighbors(edge_index, batch, edge_attr, pos, edge_offset, cell, x.shape[-2])
            if near is not None and not self.attention.needs.positions:
                pos = None  # not needed: the offsets follow from pos, which has been checked
        if x.ndim == 3:
            near = near if near is None else near.repeated(x.shape[0])
            pos = pos if pos is None else pos.expand(x.shape[0], *pos.shape)
        if near is not None and (self.explain or any(map(vars(self).get, _HOOKS))):
            near = copy.copy(near)
            near.sums = self._message_sums
        return self.attention(
            x, batch=batch, batch_size=batch_size, max_num_nodes=max_num_nodes, pos=pos, grid=grid, neighbors=near,
            return_vectors=return_vectors,
        )  # fmt: skip

    def neighbors(
        self, edge_index: Adj, batch: Tensor | None = None, edge_attr: Tensor | None = None, pos: Tensor | None = None,
        *, edge_offset: Tensor | None = None, cell: Tensor | None = None, num_nodes: int,
    ) -> NeighborList | None:  # fmt: skip
        """Checks and sorts the edges of a graph, once for all layers that share it.

        Returns :obj:`None` if the kind of positions does not use edges. The arguments are those of :meth:`forward`, and
        :obj:`num_nodes` is the number of nodes.
        """
        check_sources(edge_index, edge_attr, edge_offset, None, cell)
        near = self._neighbors(edge_index, batch, edge_attr, pos, edge_offset, cell, num_nodes)
        if near is not None and batch is not None:
            checks.tensor("batch", batch, torch.int64, [(num_nodes,)], near.target.device)
            near.check_graphs("edge_index", batch)
        return near

    def _neighbors(
        self, edge_index: Adj, batch: Tensor | None, edge_attr: Tensor | None, pos: Tensor | None,
        edge_offset: Tensor | None, cell: Tensor | None, num_nodes: int,
    ) -> NeighborList | None:  # fmt: skip
        """Checks and sorts edges, except for their graphs."""
        if self.flow == "target_to_source" and is_sparse(edge_index):
            raise ValueError("edge_index must not be an adjacency matrix with flow='target_to_source'")
        edge_index, edge_attr = plain_edges(edge_index, edge_attr, num_nodes)
        edge_index = edge_index if self.flow == "source_to_target" else edge_index.flip(0)
        if edge_attr is not None and self.attention.needs.edge_dim is None:
            what = f"shape {tuple(edge_attr.shape)}" if isinstance(edge_attr, Tensor) else type(edge_attr).__name__
            raise ValueError(
                f"edge_attr must be None without edge_dim, got {what}: it holds features of edges; give their offsets "
                "as edge_offset"
            )
        if batch is None:
            self.warn_of_hidden_batch(edge_index, num_nodes)
        needs, shape = self.attention.needs, (num_nodes, self.attention.needs.dim)
        if needs.dim and pos is not None and edge_offset is not None and (needs.neighbors or needs.positions):
            pos = checks.positions(pos, shape, edge_index, "")
            edge_offset = placed_offsets(pos, edge_offset, edge_index, batch, cell, needs)
        if not needs.neighbors:
            return None
        features, offsets, between = of_edges("edge_attr", edge_attr, edge_index, needs.edge_dim), None, False
        if needs.dim and edge_offset is not None:
            offsets = cast(Tensor, of_edges("edge_offset", edge_offset, edge_index, needs.dim))
            offsets = whole_offsets(offsets, pos, "edge_offset") if needs.whole else offsets
        elif needs.dim:
            if pos is None:
                raise ValueError("pos or edge_offset must be given where offsets are needed, got None")
            offsets, between = offsets_between(read_pos(pos, shape, edge_index, needs), edge_index, needs.whole), True
        return NeighborList(edge_index, num_nodes, offsets, features=features, between_positions=between, checked=True)

    def _message_sums(
        self, near: NeighborList, weights: Tensor, value: Tensor, values: tuple[Tensor, ...] | None, dropout: float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Sums over near pairs of weights times values, of weights times features, and of weights, by messages along
        the edges as they were given. So explainers and hooks see messages."""
        alpha, features = weights.T, None if values is None else values[0]
        if near.order is not None:  # self-loops have no weight
            count, order = near.edge_index.shape[1], near.order
            alpha = alpha.new_zeros(count, alpha.shape[1]).index_copy(0, order, alpha)
            if features is not None:
                features = features.new_zeros(count, features.shape[1]).index_copy(0, order, features)
        edge_index = near.edge_index if self.flow == "source_to_target" else near.edge_index.flip(0)
        # propagate_type: (value: Tensor, alpha: Tensor, features: OptTensor, dropout: float)
        out = self.propagate(  # type: ignore[operator]
            edge_index, value=value.transpose(0, 1), alpha=alpha, features=features, dropout=dropout, size=None
        ).transpose(0, 1)
        sums, feature_sums, total = out.split([value.shape[-1], out.shape[-1] - value.shape[-1] - 1, 1], -1)
        return sums, None if features is None else feature_sums, total[..., 0]

    def message(self, value_j: Tensor, alpha: Tensor, features: OptTensor, dropout: float) -> Tensor:
        """The softmax weights among near pairs: times values, times features of edges, and without a factor."""
        if features is not None:
            value_j = torch.cat([value_j, features[:, None].expand(-1, value_j.shape[1], -1)], -1)
        kept = torch.nn.functional.dropout(alpha, dropout) if dropout else alpha
        return torch.cat([kept[..., None] * value_j, alpha[..., None]], -1)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.attention.extra_repr()})"


def plain_edges(edge_index, edge_attr: Tensor | None, nodes: int) -> tuple[Tensor, Tensor | None]:
    """Edges (2, E) and their features, from a Tensor, an EdgeIndex, or an adjacency with targets as rows, as in PyG.

    Values of an adjacency with several columns are features, unless ``edge_attr`` is given, in the order of its rows.
    """
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    elif is_sparse(edge_index):
        size = tuple(edge_index.sizes()[:2] if isinstance(edge_index, SparseTensor) else edge_index.shape[:2])
        if size != (nodes, nodes):
            raise ValueError(f"edge_index must be a {nodes} x {nodes} adjacency, got {size}")
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.sparse_csc:
            edge_index = edge_index.to_sparse_coo().coalesce()
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.sparse_coo:
            (target, source), values = edge_index._indices(), edge_index._values()  # pairs given twice stay apart
        else:
            (target, source), values = to_edge_index(edge_index)
        edge_index = torch.stack([source, target])
        edge_attr = values if edge_attr is None and values is not None and values.ndim == 2 else edge_attr
    if isinstance(edge_index, Tensor) and edge_index.dtype == torch.int32:
        edge_index = edge_index.long()
    check_edges(edge_index, nodes)
    return edge_index, edge_attr


def check_nodes(x: object, channels: int, signals: bool = False) -> None:
    """Raise ValueError unless x holds features of one set of nodes, or if allowed of several ``signals`` on them."""
    if not isinstance(x, Tensor):
        why = "pass its fields, such as data.x and data.pos" if isinstance(x, BaseData) else ONE_SET
        raise ValueError(f"x must be one tensor of shape (N, {channels}), got {type(x).__name__}: {why}")
    if x.ndim != 2 and not (signals and x.ndim == 3):
        wanted = f"(N, {channels}){f', or (B, N, {channels}) for signals on one graph' if signals else ''}"
        how = "" if signals else "; with signals (B, N, F) on one graph make a batch of B graphs"
        raise ValueError(f"x must have shape {wanted}, got {tuple(x.shape)}{how}")


def check_sources(edge_index: object, edge_attr: object, edge_offset: object, near: object, cell: object) -> None:
    """Raise ValueError for arguments that would have no effect."""
    for name, given in (("edge_index", edge_index), ("edge_attr", edge_attr), ("edge_offset", edge_offset)):
        if given is not None and near is not None:
            raise ValueError(f"{name} must be None where neighbors are given, which attention takes in place of edges")
    for name, given in (("edge_attr", edge_attr), ("edge_offset", edge_offset)):
        if given is not None and edge_index is None:
            raise ValueError(f"{name} must be None where edge_index is None: it has a row for each edge")
    if cell is not None and edge_offset is None:
        raise ValueError("cell must be None without edge_offset, which says where edges cross the border of the cell")


def batch_of(
    batch: Tensor | None, ptr: Tensor | None, nodes: int, batch_size: int | None
) -> tuple[Tensor | None, int | None]:
    """The graph index of a ``batch`` or of ``ptr``, the positions where graphs begin, and the number of graphs."""
    for name, index in (("batch", batch), ("ptr", ptr)):
        if index is not None and not isinstance(index, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(index).__name__}")
    if ptr is None:
        return batch, batch_size
    if batch is not None:
        raise ValueError("ptr must be None where batch is given: they say the same")
    if ptr.dtype != torch.int64 or ptr.ndim != 1 or ptr.shape[0] < 2:
        raise ValueError(f"ptr must be int64 (graphs + 1,), got {ptr.dtype} of shape {tuple(ptr.shape)}")
    if not checks.passes(lambda: ptr[0] == 0 and ptr[-1] == nodes and (ptr.diff() >= 0).all(), ptr):
        raise ValueError(f"ptr must rise from 0 to {nodes}, got {ptr.tolist()[:8]}")
    index = torch.searchsorted(ptr, torch.arange(nodes, device=ptr.device), right=True) - 1
    return index, ptr.shape[0] - 1 if batch_size is None else batch_size


def placed_offsets(
    pos: Tensor, edge_offset: Tensor, edge_index: Tensor, batch: Tensor | None, cell: Tensor | None, needs: Needs
) -> Tensor:
    """Offsets of edges with the derivatives of positions and cells. Raise ValueError unless they are differences of
    positions, up to whole lattice vectors if there is a ``cell`` and no layer ``needs`` the positions of all nodes.
    Values are read on a CPU only."""
    (source, target), dim, images = edge_index, pos.shape[-1], None
    edge_offset = cast(Tensor, of_edges("edge_offset", edge_offset, edge_index, dim))
    check_fields(len(target), edge_offset, None)
    if cell is not None:
        fits = isinstance(cell, Tensor) and cell.ndim in (2, 3) and cell.shape[-1] == dim and cell.is_floating_point()
        if not fits or cell.device != pos.device or cell.numel() % dim**2 or (cell.ndim == 3 and cell.shape[1] != dim):
            wanted = f"floating point ({dim}, {dim}) or (graphs, {dim}, {dim}) on {pos.device}"
            raise ValueError(f"cell must be {wanted}, got {checks.described(cell)}")
        lattice = cell.reshape(-1, dim, dim)
        graph = torch.zeros_like(target) if batch is None or len(lattice) == 1 else batch[target]
        alone = batch is None and len(lattice) != 1
        if alone or not checks.passes(lambda: (graph < len(lattice)).all(), graph):
            raise ValueError(f"cell must be one for all graphs or one a graph, got {len(lattice)} cells")
        if not needs.positions:
            images = images_of(edge_offset - (pos[source] - pos[target]), lattice, graph)
    rule = NO_FAR_OFFSETS
    if not needs.positions:
        up_to = "periods: pass the cell of a periodic graph" if cell is None else "lattice vectors of cell"
        rule = f"edge_offset must be differences of pos, up to whole {up_to}; leave it out after transforms of pos"
    check_between(rule, pos, edge_offset, target, source, needs.whole, images)
    return edge_offset if needs.whole else offsets_along(pos, edge_offset, target, source, images)


def _warn_of_blocks(edge_index: Tensor, nodes: int) -> None:
    if not edge_index.shape[1]:
        return
    low, high = edge_index.aminmax(dim=0)
    furthest = high.new_zeros(nodes).scatter_reduce(0, low, high, "amax").cummax(0).values
    joined = furthest > torch.arange(nodes, device=low.device)  # node n and n + 1 lie in one block
    blocks = int((joined & ~torch.cat([joined.new_zeros(1), joined[:-1]])).sum())
    if blocks > 1:
        warnings.warn(
            f"the edges form {blocks} separate blocks, but batch is None, so all nodes attend to each other. If these "
            f"are {blocks} graphs, pass batch or ptr (GPSConv drops batch: call it with ptr=data.ptr). For one "
            f"graph of several parts pass batch=torch.zeros({nodes}, dtype=torch.long)",
            stacklevel=2,
        )
