"""Performer attention with relative positions as message passing."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse

from tg_equiattn import checks
from tg_equiattn.functional import sum_aggregation
from tg_equiattn.grids import PixelGrid
from tg_equiattn.neighbours import Neighbours, Pattern
from tg_equiattn.nn import PerformerAttention
from tg_equiattn.nn.not_scriptable import NotScriptable
from tg_equiattn.transforms import transformed

from .graph import (
    batch_of,
    check_hidden_batch,
    check_sources,
    near_pairs_of,
    plain_edges,
    refuse_batch_as_edge_attr,
)

_ONE_SET = "attention is among the nodes of one set; bipartite graphs have two"


class RelativePerformerConv(NotScriptable, MessagePassing):
    r"""Global attention over the nodes of each graph in linear time, from the
    `"Translational Equivariance in Kernelizable Attention" <https://arxiv.org/abs/2102.07680>`_ paper, whose output
    depends on relative positions only.

    With the default :obj:`position="window"`, near pairs (the edges) have exact softmax weights and all pairs are
    reached through random features:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_o \frac{\sum_j w_{ij} \mathbf{v}_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^{f} \langle \phi(\mathbf{q}_i), \phi(\mathbf{k}_j) \rangle + [j \in \mathcal{N}(i) \cup \{i\}]
        \exp \left( \mathbf{q}_i^{\top} \mathbf{k}_j / \sqrt{d} + b(\mathbf{p}_j - \mathbf{p}_i) \right)

    See :class:`tg_equiattn.nn.PerformerAttention` for the other positions and for their exactness: :obj:`"window"` and
    :obj:`"clipped"` are equivariant to translations for any draw of the features, :obj:`"sinusoid"` only in
    expectation over draws, :obj:`"absolute"` not at all.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size from the first input.
        out_channels (int): Size of each output sample, a multiple of :obj:`heads`.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        position (str, optional): :obj:`"window"`, :obj:`"clipped"`, :obj:`"sinusoid"`, :obj:`"absolute"` or
            :obj:`None`. (default: :obj:`"window"`)
        pos_dim (int, optional): Dimension of positions. (default: :obj:`2`)
        num_features (int, optional): Number of random features; :obj:`None` means
            :math:`\max(16, \lfloor d \ln d \rfloor)` for heads of width :math:`d`. (default: :obj:`None`)
        max_distance (float or str, optional): In the unit of :obj:`pos`: offsets of near pairs are below it on every
            axis (:obj:`"window"`); distances are clipped to it (:obj:`"clipped"`). A whole number where offsets are; a
            real one with :obj:`offset="mlp"` and :obj:`"distance"`, which divide by it, or there :obj:`"auto"`: twice
            the mean length of the edges of the first call, kept in checkpoints. (default: :obj:`6`)
        offset (str, optional): Bias :math:`b` of :obj:`"window"`: a :obj:`"table"` over integer offsets, an
            :obj:`"mlp"` of the offset for points off a grid, or a function of the :obj:`"distance"`, invariant to
            rotations and smooth, also where an edge reaches :obj:`max_distance`. (default: :obj:`"table"`)
        values (str, optional): With :obj:`"offset"`, near pairs add a learned function of their offset (of their
            distance with :obj:`offset="distance"`) to the value. (default: :obj:`"content"`)
        edge_dim (int, optional): Edge feature dimensionality: :obj:`edge_attr` then holds features that add a linear
            map to the scores of edges, and offsets come from :obj:`pos`. (default: :obj:`None`)
        position_heads (int, optional): Heads of :obj:`"clipped"` that see positions; :obj:`None` means half of them,
            at least one. (default: :obj:`None`)
        redraw_interval (int, optional): Training steps between draws of the features. (default: :obj:`None`)
        method (str, optional): :obj:`"features"`, in linear time, or :obj:`"pairs"`: softmax attention over all pairs
            of a graph, whose weights the features estimate; for graphs of up to about a hundred nodes, such as
            molecules. Not for :obj:`"clipped"`. (default: :obj:`"features"`)
        scale (float, optional): Factor of scores; :obj:`None` means :math:`1/\sqrt{d}`. (default: :obj:`None`)
        bias (bool, optional): If set to :obj:`False`, the output has no bias. (default: :obj:`True`)
        dropout (float, optional): Dropout probability of the output. (default: :obj:`0.0`)
        check_batch (bool, optional): If set to :obj:`False`, calls without :obj:`batch` and :obj:`ptr` are taken for
            one graph, whatever the edges look like; see the note below. (default: :obj:`True`)
        process_group (torch.distributed.ProcessGroup, optional): Whose processes share the nodes of every graph, see
            :doc:`/shared_graphs`. Not for :obj:`"window"` and :obj:`"clipped"`. (default: :obj:`None`)
        **kwargs (optional): Additional arguments of :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` *(optional)*,
          offsets :math:`\mathbf{p}_j - \mathbf{p}_i` as edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          positions :math:`(|\mathcal{V}|, D)` *(optional)*, graph indices :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    .. note::
        :class:`torch_geometric.nn.GPSConv` does not pass :obj:`batch` on to its :obj:`conv`. Give it
        :obj:`ptr=data.ptr` besides, which reaches this layer. Where neither came and nodes lie in blocks that no edge
        leaves, several graphs may have come as one: a :obj:`ValueError` is raised if two nodes of different blocks have
        the same :obj:`pos`, as pixels of different images have, and a warning is given otherwise, as one graph may have
        several clusters. For that, within :class:`torch_geometric.nn.HeteroConv` or :class:`~torch_geometric.nn.models.
        basic_gnn.BasicGNN`, which pass no :obj:`batch` on either, there is :obj:`check_batch=False`. What edges do not
        show passes as one graph: graphs without edges, any call under :meth:`torch.compile`, and on CUDA all calls of a
        layer but the first.

    .. note::
        Offsets of near pairs are differences of :obj:`pos`, in its precision. Give positions far from the origin, such
        as map coordinates of 5e6 m, in float64, which features need not be: in float32 they are exact to 0.5 m there.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from tg_equiattn.integrations.pyg import PixelGraph
        >>> transform = PixelGraph(max_distance=4)
        >>> data = Batch.from_data_list([transform(Data(image=torch.rand(3, 6, 7))) for _ in range(2)])
        >>> conv = RelativePerformerConv(3, 16, heads=4, max_distance=4)
        >>> conv(data.x, data.edge_index, data.edge_attr, data.pos, data.batch).shape
        torch.Size([84, 16])
    """

    SUPPORTS_FUSED_EDGE_INDEX = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        position: str | None = "window",
        pos_dim: int = 2,
        num_features: int | None = None,
        max_distance: float | str = 6,
        offset: str = "table",
        values: str = "content",
        edge_dim: int | None = None,
        position_heads: int | None = None,
        redraw_interval: int | None = None,
        method: str = "features",
        scale: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        check_batch: bool = True,
        process_group: Any = None,
        **kwargs,
    ):
        kwargs.setdefault("aggr", "sum")
        if kwargs["aggr"] not in ("sum", "add"):
            raise ValueError(f"aggr must be 'sum', got {kwargs['aggr']!r}")
        if isinstance(in_channels, tuple | list):
            raise ValueError(f"in_channels must be one number, got {in_channels!r}: {_ONE_SET}")
        if kwargs.setdefault("node_dim", 0) != 0:
            raise ValueError(f"node_dim must be 0, got {kwargs['node_dim']!r}")
        super().__init__(**kwargs)
        self.out_channels, self.heads = out_channels, heads
        self.attention = PerformerAttention(
            in_channels, out_channels, heads, position=position, pos_dim=pos_dim, num_features=num_features,
            max_distance=max_distance, offset=offset, values=values, edge_dim=edge_dim, position_heads=position_heads,
            redraw_interval=redraw_interval, method=method, scale=scale, bias=bias, dropout=dropout,
            process_group=process_group,
        )  # fmt: skip
        if not self.attention.positions.weighs_pairs:
            self.explain = False  # weights are not one number an edge
        self.check_batch, self._checked = check_batch, False

    @property
    def in_channels(self) -> int:
        """Size of each input sample; -1 where it is not known yet."""
        return self.attention.in_channels

    @property
    def process_group(self) -> Any:
        """Whose processes share the nodes of every graph; :obj:`None` where all are here."""
        return self.attention.process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        self.attention.process_group = process_group

    def reset_parameters(self):
        """Resets all learnable parameters of the module, and draws the random features again."""
        super().reset_parameters()
        self.attention.reset_parameters()

    def redraw_features(self, generator: torch.Generator | None = None):
        """Draws new random features, from the layer's own seed or from a CPU :obj:`generator`."""
        self.attention.redraw_features(generator)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | None = None,
        edge_attr: Tensor | None = None,
        pos: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
        grid: PixelGrid | None = None,
        neighbours: Neighbours | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor or EdgeIndex, optional): The near pairs, in any order. Without
                it they are found from :obj:`pos`: Manhattan distance below :obj:`max_distance`, at most 1,000 pairs a
                node on average.
            edge_attr (torch.Tensor, optional): Offsets :math:`\\mathbf{p}_j - \\mathbf{p}_i` of the edges. Without it
                they come from :obj:`pos`. A table and :obj:`"clipped"` need whole ones, up to rounding, and refuse
                others. With :obj:`edge_dim` it holds that many features of each edge instead.
            pos (torch.Tensor, optional): The positions of nodes.
            batch (torch.Tensor, optional): The sorted graph index of nodes; :obj:`None` means one graph.
            ptr (torch.Tensor, optional): Where graphs begin, in place of :obj:`batch`.
            batch_size (int, optional): The number of graphs; spares reading it from :obj:`batch`, and is needed for a
                full graph in :meth:`torch.compile`.
            max_num_nodes (int, optional): A bound of the nodes of a graph, which :obj:`method="pairs"` needs in
                :meth:`torch.compile`.
            grid (PixelGrid, optional): Every graph is all pixels of this grid, with its near pairs; stands for edges
                and positions.
            neighbours (Neighbours, optional): Near pairs from :meth:`neighbours`, to share among layers.
            return_attention_weights (bool, optional): If set to :obj:`True`, will additionally return the tuple
                :obj:`(edge_index, attention_weights)`: near pairs in the order of their targets, then nodes with
                themselves, and each head's shares of them in what their targets attend to, which add up to one over
                all nodes of a graph. :obj:`"window"` only. (default: :obj:`None`)
        """
        if isinstance(x, tuple | list):
            raise ValueError(
                f"x must be one tensor of shape (N, {self.in_channels}), got {type(x).__name__}: {_ONE_SET}"
            )
        if not isinstance(x, Tensor) or x.ndim != 2:
            what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be a tensor of shape (N, {self.in_channels}), got {what}")
        check_sources(edge_index, edge_attr, grid)
        batch, graphs = batch_of(batch, ptr, x.shape[0])
        batch_size = graphs if batch_size is None else batch_size
        if grid is None and self.attention.ranks is None:  # which do not know each other's batch
            batch_size = checks.batch_index(batch, batch_size, x)
        if neighbours is None and grid is None and edge_index is not None:
            neighbours = self.neighbours(edge_index, edge_attr, pos, batch, num_nodes=x.shape[0])
        if self.explain and neighbours is not None and neighbours.weights is None:
            raise ValueError("neighbours must come from this layer's neighbours() where it is explained, got others")
        if return_attention_weights and neighbours is None and self.attention.positions.weighs_pairs:
            raise ValueError("edge_index or neighbours must be given with return_attention_weights, got neither")
        out = self.attention(
            x, batch=batch, batch_size=batch_size, max_num_nodes=max_num_nodes, pos=pos, grid=grid,
            neighbours=neighbours, aggregate=self._aggregate, return_attention_weights=bool(return_attention_weights),
        )  # fmt: skip
        if neighbours is None or not return_attention_weights:
            return out
        return out[0], (self._weighted_pairs(neighbours), out[1])

    def _weighted_pairs(self, neighbours: Neighbours) -> Tensor:
        """The edges that weights are returned of."""
        pairs = torch.stack([neighbours.pattern.col, neighbours.pattern.row])
        pairs = torch.cat([pairs, torch.arange(neighbours.nodes, device=pairs.device).expand(2, -1)], 1)
        return pairs if self.flow == "source_to_target" else pairs.flip(0)

    def neighbours(
        self,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        pos: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        num_nodes: int,
    ) -> Neighbours | None:
        """Checks a graph's edges and sorts them, once for all layers that share it; :obj:`None` where positions need
        none. Arguments as :meth:`forward`."""
        if self.flow == "target_to_source" and is_sparse(edge_index):
            raise ValueError("edge_index must not be an adjacency matrix with flow='target_to_source'")
        edge_index, edge_attr = plain_edges(edge_index, edge_attr, num_nodes)
        edge_index = edge_index if self.flow == "source_to_target" else edge_index.flip(0)
        here = edge_index.device.type == "cpu"
        if batch is None and not torch.compiler.is_compiling():
            refuse_batch_as_edge_attr(edge_attr, edge_index.shape[1], num_nodes)
            if self.check_batch and (here or not self._checked):
                check_hidden_batch(edge_index, pos, num_nodes)
                self._checked = True
        if not self.attention.needs_neighbours:
            return None
        return near_pairs_of(
            edge_index, edge_attr, pos, batch, nodes=num_nodes, pos_dim=self.attention.pos_dim,
            whole=self.attention.whole_offsets, edge_dim=self.attention.edge_dim, weights=self._explained(edge_index),
        )  # fmt: skip

    def _explained(self, edge_index: Tensor) -> Tensor | None:
        """The mask of edges under explanation, which their near weights are multiplied by."""
        if not self.explain:
            return None
        if self._edge_mask is None:
            raise ValueError("edge_mask must be given where explain is True, got None")
        mask = self._edge_mask.sigmoid() if self._apply_sigmoid else self._edge_mask
        if mask.shape != edge_index.shape[1:]:
            raise ValueError(f"edge_mask must have shape ({edge_index.shape[1]},), got {tuple(mask.shape)}")
        return mask

    def _aggregate(self, x: Tensor, pattern: Pattern) -> Tensor:
        """Sums of x over the columns of every row of a sparse relation: messages, or one sparse product."""
        if torch.compiler.is_compiling() or transformed() or self.flow != "source_to_target":  # where PyG does not fuse
            return sum_aggregation(x, pattern)
        size = (x.shape[0], pattern.rows)
        edge_index = EdgeIndex(torch.stack([pattern.col, pattern.row]), sparse_size=size, sort_order="col")
        return self.propagate(edge_index, x=x, pattern=pattern, size=size)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def message_and_aggregate(self, edge_index: Adj, x: Tensor, pattern: Pattern) -> Tensor:
        return sum_aggregation(x, pattern)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads}, "
            f"position={self.attention.position!r})"
        )
