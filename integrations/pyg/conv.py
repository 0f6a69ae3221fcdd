"""Performer attention with relative positions as message passing."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj

from tg_equiattn import checks
from tg_equiattn.functional import sum_aggregation
from tg_equiattn.grids import PixelGrid
from tg_equiattn.neighbors import Neighbors, Pattern
from tg_equiattn.nn import PerformerAttention, PositionalPerformerAttention
from tg_equiattn.nn.linear.performer import RENAMED
from tg_equiattn.transforms import transformed

from .kernel_attention import ONE_SET, KernelAttentionConv


class RelativePerformerConv(KernelAttentionConv):
    r"""Global attention over the nodes of each graph in linear time, whose output depends on relative positions only;
    after the `"Translational Equivariance in Kernelizable Attention" <https://arxiv.org/abs/2102.07680>`_ paper.

    Near pairs (the edges) have exact softmax weights and all pairs are reached through random features:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_o \frac{\sum_j w_{ij} \mathbf{v}_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^{f} \langle \phi(\mathbf{q}_i), \phi(\mathbf{k}_j) \rangle + [j \in \mathcal{N}(i) \cup \{i\}]
        \exp \left( \mathbf{q}_i^{\top} \mathbf{k}_j / \sqrt{d} + b(\mathbf{p}_j - \mathbf{p}_i) \right)

    With :obj:`values="offset"` heads attend to offsets of all nodes beside content:
    :math:`\sum_j w_{ij} (\mathbf{p}_j - \mathbf{p}_i) / \sum_j w_{ij}` joins the output. Everything is exact under
    translations for any draw of the features. See :class:`tg_equiattn.nn.PerformerAttention`, and
    :class:`PositionalPerformerConv` for the paper's own positions.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size from the first input.
        out_channels (int): Size of each output sample, a multiple of :obj:`heads`.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        pos_dim (int, optional): Dimension of positions. (default: :obj:`2`)
        max_distance (float or str, optional): In the unit of :obj:`pos`, the length that offsets are measured in, and
            below which nodes are near where there are no edges. With :obj:`offset="table"` a whole number, below which
            offsets are on every axis, and Manhattan distances; elsewhere real, and Euclidean, or there :obj:`"auto"`:
            twice the mean length of the edges of the first call in training, kept in checkpoints. (default: :obj:`6`)
        offset (str, optional): Bias :math:`b`: a :obj:`"table"` over integer offsets, an :obj:`"mlp"` of the offset for
            points off a grid, or a function of the :obj:`"distance"`, invariant to rotations and smooth, also where an
            edge reaches :obj:`max_distance`. :obj:`None` leaves near pairs out. (default: :obj:`"table"`)
        values (str, optional): With :obj:`"offset"`, heads attend to the offsets of all nodes, and near pairs add a
            learned function of their offset to the value. With :obj:`offset="distance"` only inner products of the
            heads' mean offsets, and functions of near distances, enter: outputs stay invariant to rotations.
            (default: :obj:`"content"`)
        edge_dim (int, optional): Edge feature dimensionality: :obj:`edge_attr` then adds a linear map to the scores of
            edges. (default: :obj:`None`)
        num_random_features (int, optional): :obj:`None` means :math:`\max(64, \lfloor d \ln d \rfloor)` for heads of
            width :math:`d`. (default: :obj:`None`)
        redraw_interval (int, optional): Training steps between draws of the features. (default: :obj:`None`)
        method (str, optional): :obj:`"features"`, in linear time; :obj:`"pairs"`: softmax attention over all pairs of a
            graph, whose weights the features estimate; or :obj:`"auto"`: pairs for each graph of at most twice as many
            nodes as there are features, features for the others. What is learned for one does not hold for the other:
            where sizes of training and test lie on both sides, choose one. (default: :obj:`"auto"`)
        dropout (float, optional): Dropout probability of the weights of near pairs, and of whole keys among all.
            (default: :obj:`0.0`)
        **kwargs (optional): Additional arguments of :class:`torch_geometric.nn.conv.MessagePassing`.

    Set the attribute :attr:`process_group` to a :class:`torch.distributed.ProcessGroup` whose processes share the nodes
    of every graph, see :doc:`/shared_graphs`; with :obj:`offset=None` only.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` *(optional)*, graph indices :math:`(|\mathcal{V}|)` *(optional)*,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*, positions :math:`(|\mathcal{V}|, d)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    .. note::
        :class:`torch_geometric.nn.GPSConv` does not pass :obj:`batch` on to its :obj:`conv`. Give it
        :obj:`ptr=data.ptr` besides, which reaches this layer. Where neither came and nodes lie in blocks that no edge
        leaves, several graphs may have come as one: a :obj:`ValueError` is raised if two nodes of different blocks have
        the same :obj:`pos`, as pixels of different images have, and a warning is given otherwise, as one graph may have
        several clusters. For that, within :class:`torch_geometric.nn.HeteroConv` or :class:`~torch_geometric.nn.models.
        basic_gnn.BasicGNN`, which pass no :obj:`batch` on either, set the layer's :attr:`check_batch` to
        :obj:`False`. What edges do not
        show passes as one graph: graphs without edges, any call under :meth:`torch.compile`, and on CUDA all calls of a
        layer but the first.

    .. note::
        Offsets are differences of :obj:`pos`, in its precision. Give positions far from the origin, such
        as map coordinates of 5e6 m, in float64, which features need not be: in float32 they are exact to 0.5 m there.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from tg_equiattn.integrations.pyg import PixelGraph
        >>> transform = PixelGraph(max_distance=4)
        >>> data = Batch.from_data_list([transform(Data(image=torch.rand(3, 6, 7))) for _ in range(2)])
        >>> conv = RelativePerformerConv(3, 16, heads=4, max_distance=4)
        >>> conv(data.x, data.edge_index, data.batch, pos=data.pos).shape
        torch.Size([84, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        pos_dim: int = 2,
        max_distance: float | str = 6,
        offset: str | None = "table",
        values: str = "content",
        edge_dim: int | None = None,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
        method: str = "auto",
        dropout: float = 0.0,
        **kwargs,
    ):
        checks.renamed({name: kwargs[name] for name in kwargs if name in RENAMED}, RENAMED, type(self).__name__)
        if isinstance(in_channels, tuple | list):
            raise ValueError(f"in_channels must be one number, got {in_channels!r}: {ONE_SET}")
        attention = PerformerAttention(
            in_channels, out_channels, heads, pos_dim=pos_dim, max_distance=max_distance, offset=offset, values=values,
            edge_dim=edge_dim, num_random_features=num_random_features, redraw_interval=redraw_interval, method=method,
            dropout=dropout,
        )  # fmt: skip
        super().__init__(attention, **kwargs)

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
        neighbors: Neighbors | PixelGrid | None = None,
        return_attention_weights: bool | None = None,
        return_vectors: bool = False,
    ) -> Any:
        """Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor or EdgeIndex, optional): The near pairs, in any order. Without
                it they are found from :obj:`pos`: distance below :obj:`max_distance`, at most 1,000 pairs a node on
                average.
            batch (torch.Tensor, optional): The sorted graph index of nodes; :obj:`None` means one graph.
            edge_attr (torch.Tensor, optional): The edge features, with :obj:`edge_dim`. Those of self-loops are of the
                pair that every node is with itself.
            pos (torch.Tensor, optional): The positions of nodes, of which offsets are differences.
            edge_offset (torch.Tensor, optional): Offsets :math:`\\mathbf{p}_j - \\mathbf{p}_i` of the edges, in place
                of differences of :obj:`pos`, as across the border of a periodic box. With :obj:`values="offset"` they
                must be such differences, as far nodes have no offset in a periodic box.
            ptr (torch.Tensor, optional): Where graphs begin, in place of :obj:`batch`.
            batch_size (int, optional): The number of graphs; spares reading it from :obj:`batch`, and is needed for a
                full graph in :meth:`torch.compile`.
            max_num_nodes (int, optional): A bound of the nodes of a graph, which pairs need in :meth:`torch.compile`.
            neighbors (Neighbors or PixelGrid, optional): Near pairs from :meth:`neighbors`, to share among layers; or a
                grid whose pixels every graph has, which stands for edges, positions and :obj:`batch`.
            return_attention_weights (bool, optional): If set to :obj:`True`, will additionally return the tuple
                :obj:`(edge_index, attention_weights)`: near pairs in the order of their targets, then nodes with
                themselves, and each head's shares of them in what their targets attend to, which add up to one over
                all nodes of a graph. (default: :obj:`None`)
            return_vectors (bool, optional): If set to :obj:`True`, will additionally return, last, the heads' mean
                offsets of :obj:`values="offset"`, :math:`(|\\mathcal{V}|, H, d)`, which turn along with positions with
                :obj:`offset="distance"`. (default: :obj:`False`)
        """
        out, near = self._attend(
            x, edge_index, batch, edge_attr, pos, edge_offset, ptr, batch_size, neighbors, max_num_nodes=max_num_nodes,
            return_attention_weights=bool(return_attention_weights), return_vectors=return_vectors,
        )  # fmt: skip
        if near is None or not return_attention_weights:
            return out
        out, weights, *vectors = out
        return out, (self._weighted_pairs(near), weights), *vectors

    def _weighted_pairs(self, near: Neighbors) -> Tensor:
        """The edges that weights are returned of."""
        pairs = torch.stack([near.pattern.col, near.pattern.row])
        pairs = torch.cat([pairs, torch.arange(near.nodes, device=pairs.device).expand(2, -1)], 1)
        return pairs if self.flow == "source_to_target" else pairs.flip(0)


class PositionalPerformerConv(KernelAttentionConv):
    r"""Attention by random features with the positions that the `"Translational Equivariance in Kernelizable Attention"
    <https://arxiv.org/abs/2102.07680>`_ paper compares: see :class:`tg_equiattn.nn.PositionalPerformerAttention`. For
    work on graphs take :class:`RelativePerformerConv`.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size from the first input.
        out_channels (int): Size of each output sample, a multiple of :obj:`heads`.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        position (str, optional): :obj:`"clipped"`, :obj:`"sinusoid"` or :obj:`"absolute"`. (default: :obj:`"clipped"`)
        pos_dim (int, optional): Dimension of positions. (default: :obj:`2`)
        max_distance (int, optional): Distances are clipped to it. (default: :obj:`6`)
        num_random_features (int, optional): As :class:`RelativePerformerConv`. (default: :obj:`None`)
        redraw_interval (int, optional): Training steps between draws of the features. (default: :obj:`None`)
        **kwargs (optional): Additional arguments of :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        As :class:`RelativePerformerConv`.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> conv = PositionalPerformerConv(16, 16, heads=4, max_distance=3)
        >>> conv(torch.randn(9, 16), pos=torch.cartesian_prod(torch.arange(3), torch.arange(3))).shape
        torch.Size([9, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        position: str = "clipped",
        pos_dim: int = 2,
        max_distance: int = 6,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
        **kwargs,
    ):
        attention = PositionalPerformerAttention(
            in_channels, out_channels, heads, position=position, pos_dim=pos_dim, max_distance=max_distance,
            num_random_features=num_random_features, redraw_interval=redraw_interval,
        )  # fmt: skip
        super().__init__(attention, **kwargs)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | None = None,
        batch: Tensor | None = None,
        pos: Tensor | None = None,
        *,
        edge_offset: Tensor | None = None,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        neighbors: Neighbors | PixelGrid | None = None,
    ) -> Tensor:
        """Runs the forward pass of the module; arguments as :meth:`RelativePerformerConv.forward`."""
        return self._attend(
            x, edge_index, batch, None, pos, edge_offset, ptr, batch_size, neighbors, aggregate=self._aggregate
        )[0]

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
