"""The Relative Performer on graphs of pixels."""

from typing import Any

from torch import Tensor
from torch_geometric.typing import Adj

from tg_equiattn import checks
from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn.performer.attention import CUTOFF
from tg_equiattn.nn.performer.pixel_model import PixelModel
from tg_equiattn.node_batch import NodeBatch

from .conv import KernelAttentionConv
from .graph import batch_of, check_sources


@checks.python_numbers
class PixelGraphClassifier(PixelModel):
    r"""The Relative Performer of the `"Translational Equivariance in Kernelizable Attention"
    <https://arxiv.org/abs/2102.07680>`_ paper on pixel graphs: embedding, blocks, mean over each graph, linear.

    Args:
        in_channels, num_classes (int): Channels of a pixel, and number of outputs.
        channels, num_layers, heads (int, optional): Width, numbers of blocks and heads. (default: :obj:`256, 6, 8`)
        embedding (str, optional): :obj:`"linear"` (default), :obj:`"mlp"`, or :obj:`"lookup"` of 8-bit intensities.
        position (str, optional): :obj:`"window"`, near pairs as :class:`RelativePerformerConv` has them;
            :obj:`"clipped"` or :obj:`"sinusoid"`, the paper's (see :class:`tg_equiattn.nn.RelativePerformer`);
            :obj:`"absolute"`, added once, to the embedding; or :obj:`None`. (default: :obj:`"window"`)
        pos_dim, cutoff (int, optional): As :class:`RelativePerformerConv`. (default: :obj:`2, 6`)
        dropout (float, optional): Of the outputs of attention and of the feed-forward part. (default: :obj:`0.1`)
        norm (str, optional): Before the last linear map: :obj:`"layer"`, at every pixel before the mean, or
            :obj:`"batch"`, after it. (default: :obj:`"layer"`)
        attn_kwargs (Dict[str, Any], optional): Of the attention; :obj:`redraw_interval` is :obj:`100` if not given.

    Shapes:
        Arguments as :class:`RelativePerformerConv`, output :math:`(|\mathcal{G}|, \mathrm{num\_classes})`.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from tg_equiattn.integrations.pyg import PixelGraph
        >>> data = [PixelGraph(max_distance=3)(Data(image=torch.rand(1, 8, 8))) for _ in range(3)]
        >>> data = Batch.from_data_list(data)
        >>> model = PixelGraphClassifier(1, 10, channels=16, num_layers=2, heads=4, cutoff=3)
        >>> model(data.x, data.edge_index, data.batch, data.pos).shape
        torch.Size([3, 10])
    """

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
        checks.positive(num_layers=num_layers)
        super().__init__(
            in_channels, num_classes, channels, num_layers, heads, embedding, position, pos_dim, cutoff, dropout, norm,
            attn_kwargs, around=KernelAttentionConv,
        )  # fmt: skip
        self.in_channels, self.num_classes, self.position = in_channels, num_classes, position

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
        neighbors: PixelGrid | None = None,
    ) -> Tensor:
        """Runs the forward pass; arguments as :meth:`RelativePerformerConv.forward`."""
        check_sources(edge_index, None, edge_offset, neighbors)
        batch, graphs = batch_of(batch, ptr, x.shape[0])
        near: Any = neighbors
        if neighbors is not None:
            if batch is not None or x.shape[0] % len(neighbors):
                raise ValueError(
                    f"neighbors must fill every graph and stand for batch, got {neighbors} for {x.shape[0]} nodes"
                )
            node_batch, size = NodeBatch.dense(x.shape[0] // len(neighbors), len(neighbors), None, x.device), None
            if pos is None:
                pos = neighbors.pos(x.device, self.readout.head.weight.dtype).repeat(node_batch.count, 1)
        else:
            size = graphs if batch_size is None else batch_size
            node_batch = NodeBatch.flat(x, batch, 1 if batch is None and size is None else size, whole=False)
            size = node_batch.count
            if edge_index is not None:
                conv: Any = self.blocks[0].attention
                near = conv.neighbors(edge_index, batch, pos=pos, edge_offset=edge_offset, num_nodes=x.shape[0])
        x = self.embedding(x)
        if self.absolute is not None:
            pos = checks.positions(pos, (x.shape[0], self.absolute.pos_dim), x, "position='absolute' needs it")
            x = x + self.absolute(pos).to(x.dtype)
        for block in self.blocks:
            x = block(x, pos=pos, batch=batch, batch_size=size, neighbors=near)
        return self.readout(x, node_batch.mean)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.num_classes}, num_layers={len(self.blocks)}, "
            f"position={self.position!r})"
        )
