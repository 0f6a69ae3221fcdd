"""What attention by random features has in common as message passing: edges, batches, near pairs."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse

from tg_equiattn import checks
from tg_equiattn.grids import PixelGrid
from tg_equiattn.neighbors import Neighbors
from tg_equiattn.nn.linear.kernel_attention import KernelAttention
from tg_equiattn.nn.not_scriptable import NotScriptable

from .graph import batch_of, check_hidden_batch, check_sources, near_pairs_of, plain_edges

ONE_SET = "attention is among the nodes of one set; bipartite graphs have two"


class KernelAttentionConv(NotScriptable, MessagePassing):
    """What attention by random features among the nodes of graphs has in common: edges, batches, messages.

    Args:
        attention: the core's layer.
        **kwargs: of :class:`MessagePassing`.
    """

    SUPPORTS_FUSED_EDGE_INDEX = True

    def __init__(self, attention: KernelAttention, **kwargs: Any):
        kwargs.setdefault("aggr", "sum")
        if kwargs["aggr"] not in ("sum", "add"):
            raise ValueError(f"aggr must be 'sum', got {kwargs['aggr']!r}")
        if kwargs.setdefault("node_dim", 0) != 0:
            raise ValueError(f"node_dim must be 0, got {kwargs['node_dim']!r}")
        super().__init__(**kwargs)
        self.attention = attention
        if not attention.positions.weighs_pairs:
            self.explain = False  # weights are not one number an edge
        self.check_batch, self._checked = True, False

    @property
    def in_channels(self) -> int:
        """Size of each input sample; -1 where it is not known yet."""
        return self.attention.in_channels

    @property
    def out_channels(self) -> int:
        """Size of each output sample."""
        return self.attention.out_channels

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.attention.heads

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

    def _attend(
        self,
        x: Tensor,
        edge_index: Adj | None,
        batch: Tensor | None,
        edge_attr: Tensor | None,
        pos: Tensor | None,
        edge_offset: Tensor | None,
        ptr: Tensor | None,
        batch_size: int | None,
        neighbors: Neighbors | PixelGrid | None,
        **options: Any,
    ) -> tuple[Any, Neighbors | None]:
        """What the core's layer returns, and the near pairs."""
        if isinstance(x, tuple | list):
            raise ValueError(
                f"x must be one tensor of shape (N, {self.in_channels}), got {type(x).__name__}: {ONE_SET}"
            )
        if not isinstance(x, Tensor) or x.ndim != 2:
            what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be a tensor of shape (N, {self.in_channels}), got {what}")
        grid = neighbors if isinstance(neighbors, PixelGrid) else None
        near = None if isinstance(neighbors, PixelGrid) else neighbors
        check_sources(edge_index, edge_attr, edge_offset, grid)
        batch, graphs = batch_of(batch, ptr, x.shape[0])
        batch_size = graphs if batch_size is None else batch_size
        if grid is None and self.attention.ranks is None:  # which do not know each other's batch
            batch_size = checks.batch_index(batch, batch_size, x)
        if near is None and grid is None and edge_index is not None:
            near = self.neighbors(edge_index, batch, edge_attr, pos, edge_offset=edge_offset, num_nodes=x.shape[0])
        if self.explain and near is not None and near.weights is None:
            raise ValueError("neighbors must come from this layer's neighbors() where it is explained, got others")
        if options.get("return_attention_weights") and near is None and self.attention.positions.weighs_pairs:
            raise ValueError("edge_index or neighbors must be given with return_attention_weights, got neither")
        out = self.attention(x, batch=batch, batch_size=batch_size, pos=pos, grid=grid, neighbors=near, **options)
        return out, near

    def neighbors(
        self,
        edge_index: Adj,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        pos: Tensor | None = None,
        *,
        edge_offset: Tensor | None = None,
        num_nodes: int,
    ) -> Neighbors | None:
        """Checks a graph's edges and sorts them, once for all layers that share it; :obj:`None` where positions need
        none. Arguments as :meth:`forward`."""
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
        here = edge_index.device.type == "cpu"
        if batch is None and self.check_batch and not torch.compiler.is_compiling() and (here or not self._checked):
            check_hidden_batch(edge_index, pos, num_nodes)
            self._checked = True
        if not self.attention.needs_neighbors:
            return None
        return near_pairs_of(
            edge_index, edge_attr, edge_offset, pos, batch, nodes=num_nodes, pos_dim=self.attention.positions.pos_dim,
            whole=self.attention.whole_offsets, edge_dim=self.attention.positions.edge_dim,
            weights=self._explained(edge_index),
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

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.attention.extra_repr()})"
