"""The Relative Performer on graphs of pixels."""

from typing import Any

from torch import Tensor
from torch_geometric.typing import Adj

from tg_equiattn import checks
from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import RelativePerformer
from tg_equiattn.nn.performer.settings import CUTOFF
from tg_equiattn.node_batch import NodeBatch

from .conv import RelativePerformerConv
from .graph import batch_of, check_nodes, check_sources


@checks.python_numbers
class PixelGraphClassifier(RelativePerformer):
    r"""The Relative Performer of the `"Translational Equivariance in Kernelizable Attention"
    <https://arxiv.org/abs/2102.07680>`_ paper on pixel graphs: embedding, blocks, mean over each graph, linear.

    This is :class:`tg_equiattn.nn.RelativePerformer` with :class:`RelativePerformerConv` as its attention.

    Args:
        in_channels (int): Channels of a pixel.
        num_classes (int): Number of outputs.
        channels (int, optional): Width of the model, a multiple of :obj:`heads`. (default: :obj:`256`)
        num_layers (int, optional): Number of blocks. (default: :obj:`6`)
        heads (int, optional): Number of attention heads. (default: :obj:`8`)
        embedding (str, optional): Embedding of a pixel: :obj:`"linear"`, :obj:`"mlp"`, or :obj:`"lookup"` in a table of
            8-bit intensities. (default: :obj:`"linear"`)
        position (str, optional): Kind of positions: :obj:`"window"`, :obj:`"clipped"` (strategy 2 of the paper),
            :obj:`"sinusoid"` (strategy 1) or :obj:`None`, as in :class:`RelativePerformerConv`; or :obj:`"absolute"`,
            sinusoids that are added once, to the embedding, which is not equivariant to translations.
            (default: :obj:`"window"`)
        pos_dim (int, optional): Dimension of positions. (default: :obj:`2`)
        cutoff (int, optional): Pixels at a smaller Manhattan distance are near, where there are no edges.
            (default: :obj:`6`)
        dropout (float, optional): Dropout probability of the outputs of attention and of the feed-forward part.
            (default: :obj:`0.1`)
        norm (str, optional): Normalisation before the last linear map: :obj:`"layer"`, of every pixel before the mean,
            or :obj:`"batch"`, after it. (default: :obj:`"layer"`)
        attn_kwargs (Dict[str, Any], optional): Further arguments of :class:`RelativePerformerConv`. If not given,
            :obj:`redraw_interval` is :obj:`100` and :obj:`method` is :obj:`"features"`. (default: :obj:`None`)

    Shapes:
        - **input:** as :class:`RelativePerformerConv`
        - **output:** class scores :math:`(|\mathcal{G}|, \mathrm{num\_classes})`

    Example:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from tg_equiattn.integrations.pyg import PixelGraph
        >>> data = [PixelGraph(cutoff=3)(Data(image=torch.rand(1, 8, 8))) for _ in range(3)]
        >>> data = Batch.from_data_list(data)
        >>> model = PixelGraphClassifier(1, 10, channels=16, num_layers=2, heads=4, cutoff=3)
        >>> model(data.x, data.edge_index, data.batch, data.pos).shape
        torch.Size([3, 10])
    """

    attention_class = RelativePerformerConv

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        channels: int = 256,
        num_layers: int = 6,
        heads: int = 8,
        embedding: str = "linear",
        position: str | None = "window",
        pos_dim: int = 2,
        cutoff: int = CUTOFF,
        dropout: float = 0.1,
        norm: str = "layer",
        attn_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(
            in_channels, num_classes, channels=channels, num_layers=num_layers, heads=heads, embedding=embedding,
            position=position, pos_dim=pos_dim, cutoff=cutoff, dropout=dropout, norm=norm, attn_kwargs=attn_kwargs,
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        edge_index: Adj | None = None,
        batch: Tensor | None = None,
        pos: Tensor | None = None,
        *,
        edge_offset: Tensor | None = None,
        cell: Tensor | None = None,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        neighbors: PixelGrid | None = None,
    ) -> Tensor:
        """Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The pixel features.
            edge_index (torch.Tensor or SparseTensor or EdgeIndex, optional): The near pairs. Without it they are found
                from :obj:`pos`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph index of pixels, in any order; :obj:`None` means one graph.
                (default: :obj:`None`)
            pos (torch.Tensor, optional): The positions of pixels. (default: :obj:`None`)
            edge_offset (torch.Tensor, optional): Offsets :math:`\\mathbf{p}_j - \\mathbf{p}_i` of the edges, in a
                periodic graph or in place of :obj:`pos`. Where :obj:`pos` is given, too, they must be its differences,
                up to whole lattice vectors if :obj:`cell` is given. (default: :obj:`None`)
            cell (torch.Tensor, optional): The lattice vectors of periodic graphs as rows, :math:`(d, d)` or
                :math:`(|\\mathcal{G}|, d, d)`. (default: :obj:`None`)
            ptr (torch.Tensor, optional): Index of the first pixel of each graph, in place of :obj:`batch`.
                (default: :obj:`None`)
            batch_size (int, optional): The number of graphs; :meth:`torch.compile` needs it. (default: :obj:`None`)
            neighbors (PixelGrid, optional): A grid whose pixels every graph has, in place of edges, positions and
                :obj:`batch`. (default: :obj:`None`)
        """
        check_nodes(x, self.in_channels)
        check_sources(edge_index, None, edge_offset, neighbors, cell)
        batch, graphs = batch_of(batch, ptr, x.shape[0])
        near: Any = neighbors
        if neighbors is not None:
            if batch is not None or x.shape[0] % len(neighbors):
                raise ValueError(
                    f"neighbors must fill every graph and stand for batch, got {neighbors} for {x.shape[0]} nodes"
                )
            node_batch, size = NodeBatch.dense(x.shape[0] // len(neighbors), len(neighbors), None, x.device), None
            if pos is None:
                pos = self._grid_pos(neighbors, x.device).repeat(node_batch.count, 1)
        else:
            size = graphs if batch_size is None else batch_size
            size = 1 if batch is None and size is None else size
            node_batch = NodeBatch.flat(x, batch, size, whole=False, any_order=True)
            size = node_batch.count
            if edge_index is not None:
                conv: Any = self.blocks[0].attention
                near = conv.neighbors(
                    edge_index, batch, pos=pos, edge_offset=edge_offset, cell=cell, num_nodes=x.shape[0]
                )
        if self.absolute is not None:
            pos = checks.positions(pos, (x.shape[0], self.pos_dim), x, "position='absolute' needs it")
        return self._classify(x, pos, node_batch.mean, pos=pos, batch=batch, batch_size=size, neighbors=near)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.num_classes}, num_layers={len(self.blocks)}, "
            f"position={self.position!r})"
        )
