"""Performer attention with relative positions as message passing."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse

from tg_equiattn import checks
from tg_equiattn.grids import PixelGrid
from tg_equiattn.modes import is_readable
from tg_equiattn.neighbors import NeighborList
from tg_equiattn.nn import PerformerAttention
from tg_equiattn.nn.modules import NotScriptable, StoresSettings
from tg_equiattn.nn.performer.nodes import check_pos
from tg_equiattn.nn.performer.random_features import DrawsFeatures

from .graph import batch_of, check_sources, plain_edges, warn_of_hidden_batch

ONE_SET = "attention is among the nodes of one set; bipartite graphs have two"


class RelativePerformerConv(NotScriptable, DrawsFeatures, StoresSettings, MessagePassing):
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

    Set the attribute :attr:`process_group` to a :class:`torch.distributed.ProcessGroup` whose processes share the nodes
    of every graph, see :doc:`/shared_graphs`. This needs :obj:`position=None` or :obj:`"sinusoid"`, and
    :obj:`method="features"`.

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
            Euclidean. Twice :func:`tg_equiattn.neighbors.mean_edge_length` suits most graphs. :obj:`None` means
            :obj:`6`, but :obj:`offset="mlp"` and :obj:`"distance"` need a value. (default: :obj:`None`)
        offset (str, optional): Bias of near pairs: a :obj:`"table"` over whole offsets, for grids; an :obj:`"mlp"` of
            the offset, for points off a grid; a smooth function of the :obj:`"distance"`, which is invariant to
            rotations and vanishes at :obj:`cutoff`; or :obj:`None`, one number for each head, for edges between nodes
            without positions. Only for :obj:`position="window"`. (default: :obj:`"table"`)
        values (str, optional): :obj:`"content"`, or :obj:`"offset"` to attend to the offsets of all nodes, too: use it
            where outputs depend on where other nodes are. Only for :obj:`position="window"` and :obj:`None`.
            (default: :obj:`"content"`)
        key_channels (int, optional): Size of the queries and keys of each head. Few channels make random features much
            more exact, and attention can then be sharp; use about the number of properties by which nodes choose each
            other. :obj:`None` means at most :obj:`3` with :obj:`method="features"` and :obj:`position="window"` or
            :obj:`None`, and otherwise as many as values have, :obj:`out_channels // heads`. (default: :obj:`None`)
        edge_dim (int, optional): Number of features of an edge. A linear map of them is added to its score. Only for
            :obj:`position="window"`. (default: :obj:`None`)
        num_random_features (int, optional): Number of random features. More are more exact and slower. Their directions
            come in opposite pairs and have a variance that each head learns. :obj:`None` means
            :math:`\max(64, \lfloor d \ln d \rfloor)` for heads of width :math:`d`. (default: :obj:`None`)
        redraw_interval (int, optional): Number of training steps between draws of the random features. :obj:`None`
            means that only :meth:`redraw_features` draws. (default: :obj:`None`)
        method (str, optional): :obj:`"features"`, in linear time, or :obj:`"pairs"`, exact over all pairs of a graph,
            in quadratic time; use it for graphs of up to some hundred nodes. The two are different functions: a trained
            layer keeps its method. :obj:`None` means :obj:`"features"`, with one warning if the first graphs are so
            small that pairs are exact and faster. (default: :obj:`None`)
        dropout (float, optional): Probability of dropping weights in training: single ones of near pairs, whole keys
            among all pairs. (default: :obj:`0.0`)
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
    _edge_mask: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        position: str | None = "window",
        pos_dim: int = 2,
        cutoff: float | None = None,
        offset: str | None = "table",
        values: str = "content",
        key_channels: int | None = None,
        edge_dim: int | None = None,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
        method: str | None = None,
        dropout: float = 0.0,
        **kwargs,
    ):
        if isinstance(in_channels, tuple | list):
            raise ValueError(f"in_channels must be one number, got {in_channels!r}: {ONE_SET}")
        for name, allowed in (("aggr", ("sum", "add")), ("node_dim", (0,))):
            if kwargs.setdefault(name, allowed[0]) not in allowed:
                raise ValueError(f"{name} must be {allowed[0]!r}, got {kwargs[name]!r}")
        super().__init__(**kwargs)
        self.attention = PerformerAttention(
            in_channels, out_channels, heads, position=position, pos_dim=pos_dim, cutoff=cutoff, offset=offset,
            values=values, key_channels=key_channels, edge_dim=edge_dim, num_random_features=num_random_features,
            redraw_interval=redraw_interval, method=method, dropout=dropout,
        )  # fmt: skip
        self.out_channels, self.heads = self.attention.out_channels, self.attention.heads
        if not self.attention.positions.weighs_pairs:
            self.explain = False  # an edge has no weight of its own
        self._guessed_batch = False

    @property
    def in_channels(self) -> int:
        """Size of each input sample; -1 if it is not known yet."""
        return self.attention.in_channels

    @property
    def process_group(self) -> Any:
        """The :mod:`torch.distributed` group whose processes share the nodes of graphs; :obj:`None` without one."""
        return self.attention.process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        self.attention.process_group = process_group

    def settings(self) -> dict[str, Any]:
        return {"flow": self.flow if self.attention.needs_neighbors else None}

    def reset_parameters(self):
        """Resets all learnable parameters of the module, and draws the random features again."""
        super().reset_parameters()
        self.attention.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | None = None,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        pos: Tensor | None = None,
        *,
        edge_offset: Tensor | None = None,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
        neighbors: NeighborList | PixelGrid | None = None,
        return_vectors: bool = False,
    ) -> Any:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor or EdgeIndex, optional): The near pairs, in any order. Without
                it they are found from :obj:`pos`: closer than :obj:`cutoff`, at most 1,000 a node on average.
                (default: :obj:`None`)
            batch (torch.Tensor, optional): The sorted graph index of nodes; :obj:`None` means one graph.
                (default: :obj:`None`)
            edge_attr (torch.Tensor, optional): The edge features, with :obj:`edge_dim`. Features of self-loops belong
                to the pair of a node with itself. (default: :obj:`None`)
            pos (torch.Tensor, optional): The positions of nodes. Offsets are their differences, in their precision.
                (default: :obj:`None`)
            edge_offset (torch.Tensor, optional): Offsets :math:`\mathbf{p}_j - \mathbf{p}_i` of the edges in place of
                differences of :obj:`pos`, as in a periodic box. With :obj:`values="offset"` they must be differences
                of :obj:`pos`. (default: :obj:`None`)
            ptr (torch.Tensor, optional): Index of the first node of each graph, in place of :obj:`batch`.
                (default: :obj:`None`)
            batch_size (int, optional): The number of graphs; :meth:`torch.compile` needs it. (default: :obj:`None`)
            max_num_nodes (int, optional): Upper bound of the nodes of a graph, for :obj:`method="pairs"`;
                :meth:`torch.compile` needs it. (default: :obj:`None`)
            neighbors (NeighborList or PixelGrid, optional): Near pairs from :meth:`neighbors`, to share among layers;
                or a grid whose pixels every graph has, in place of edges, positions and :obj:`batch`.
                (default: :obj:`None`)
            return_vectors (bool, optional): If set to :obj:`True`, will additionally return the heads' mean offsets
                of :obj:`values="offset"`, :math:`(|\mathcal{V}|, H, d)`. (default: :obj:`False`)
        """
        if not isinstance(x, Tensor) or x.ndim != 2:
            what = tuple(x.shape) if isinstance(x, Tensor) else f"{type(x).__name__}: {ONE_SET}"
            raise ValueError(f"x must be one tensor of shape (N, {self.in_channels}), got {what}")
        grid = neighbors if isinstance(neighbors, PixelGrid) else None
        near = None if isinstance(neighbors, PixelGrid) else neighbors
        check_sources(edge_index, edge_attr, edge_offset, grid)
        batch, graphs = batch_of(batch, ptr, x.shape[0])
        batch_size = graphs if batch_size is None else batch_size
        if near is None and grid is None and edge_index is not None:
            near = self._neighbors(edge_index, edge_attr, pos, edge_offset, x.shape[0], batch is None)
            if near is not None and near.between_positions and not self.attention.needs_positions:
                pos = None  # not needed: offsets are differences of pos, which has been checked
        if self.explain and near is not None and near.weights is None:
            raise ValueError("neighbors must come from this layer's neighbors() where it is explained, got others")
        return self.attention(
            x, batch=batch, batch_size=batch_size, max_num_nodes=max_num_nodes, pos=pos, grid=grid, neighbors=near,
            return_vectors=return_vectors,
        )  # fmt: skip

    def neighbors(
        self,
        edge_index: Adj,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        pos: Tensor | None = None,
        *,
        edge_offset: Tensor | None = None,
        num_nodes: int,
    ) -> NeighborList | None:
        """Checks and sorts the edges of a graph, once for all layers that share it.

        Returns :obj:`None` if the kind of positions does not use edges. The arguments are those of :meth:`forward`, and
        :obj:`num_nodes` is the number of nodes.
        """
        near = self._neighbors(edge_index, edge_attr, pos, edge_offset, num_nodes, batch is None)
        if near is not None and batch is not None:
            checks.tensor("batch", batch, torch.int64, [(num_nodes,)], near.target.device)
            near.check_graphs("edge_index", batch)
        return near

    def _neighbors(
        self, edge_index: Adj, edge_attr: Tensor | None, pos: Tensor | None, edge_offset: Tensor | None, num_nodes: int,
        single: bool,
    ) -> NeighborList | None:  # fmt: skip
        """Checks and sorts edges, except for their graphs. ``single`` is true if all nodes are taken for one graph."""
        if self.flow == "target_to_source" and is_sparse(edge_index):
            raise ValueError("edge_index must not be an adjacency matrix with flow='target_to_source'")
        edge_index, edge_attr = plain_edges(edge_index, edge_attr, num_nodes)
        edge_index = edge_index if self.flow == "source_to_target" else edge_index.flip(0)
        if edge_attr is not None and self.attention.positions.edge_dim is None:
            what = f"shape {tuple(edge_attr.shape)}" if isinstance(edge_attr, Tensor) else type(edge_attr).__name__
            raise ValueError(
                f"edge_attr must be None without edge_dim, got {what}: it holds features of edges; give their offsets "
                "as edge_offset"
            )
        if single and not self._guessed_batch and is_readable(edge_index):
            warn_of_hidden_batch(edge_index, num_nodes)
            self._guessed_batch = True
        if not self.attention.needs_neighbors:
            return None
        dim = self.attention.positions.pos_dim or None
        if edge_offset is None and dim is not None:
            check_pos(pos, self.attention.positions)
        return NeighborList.from_edges(
            edge_index, num_nodes, checked=True, dim=dim, pos=pos, offsets=edge_offset,
            whole=self.attention.whole_offsets, edge_dim=self.attention.positions.edge_dim, features=edge_attr,
            weights=self._explained(edge_index),
        )  # fmt: skip

    def _explained(self, edge_index: Tensor) -> Tensor | None:
        """The edge mask of an explanation, which multiplies the weights of near pairs; :obj:`None` without one."""
        if not self.explain:
            return None
        if self._edge_mask is None:
            raise ValueError("edge_mask must be given where explain is True, got None")
        mask = self._edge_mask.sigmoid() if self._apply_sigmoid else self._edge_mask
        if mask.shape != edge_index.shape[1:]:
            raise ValueError(f"edge_mask must have shape ({edge_index.shape[1]},), got {tuple(mask.shape)}")
        return mask

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.attention.extra_repr()})"
