"""General, powerful, scalable layers whose global attention knows relative positions or distances."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse

from tg_equiattn import checks
from tg_equiattn.graphs import NeighborList
from tg_equiattn.linear.random_features import DrawsFeatures
from tg_equiattn.modules import StoresSettings, reset_children, with_zero_gradients

from .conv import RelativePerformerConv, batch_of, check_nodes, check_sources, plain_edges
from .ewald import EwaldAttention


@checks.arguments
class RelativeGPSBlock(DrawsFeatures, StoresSettings):
    r"""The layer of the `"Recipe for a General, Powerful, Scalable Graph Transformer"
    <https://arxiv.org/abs/2205.12454>`_ paper, as :class:`~torch_geometric.nn.conv.GPSConv` computes it, with
    :class:`RelativePerformerConv` as its global attention, whose near pairs are the edges, or :class:`EwaldAttention`.

    .. math::
        \mathbf{h} = \mathrm{Norm}_1(\mathbf{x} + \mathrm{Conv}(\mathbf{x})) +
        \mathrm{Norm}_2(\mathbf{x} + \mathrm{Attention}(\mathbf{x})), \qquad
        \mathbf{x}^{\prime} = \mathrm{Norm}_3(\mathbf{h} + \mathbf{W}_2\, \mathrm{act}(\mathbf{W}_1 \mathbf{h}))

    Args:
        channels (int): Size of each input and output sample, a multiple of :obj:`heads`.
        conv (MessagePassing or None): The local message passing layer, from :obj:`channels` to :obj:`channels`. It gets
            :obj:`x`, :obj:`edge_index`, those of :obj:`edge_attr`, :obj:`pos` and :obj:`batch` that its :meth:`forward`
            names, and all further keywords of the call. :obj:`None` leaves it out.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        dropout (float, optional): Dropout probability of the outputs of :obj:`conv`, attention and the MLP.
            (default: :obj:`0.0`)
        act (str or torch.nn.Module, optional): The activation of the MLP. (default: :obj:`"relu"`)
        norm (str or torch.nn.Module, optional): The normalization layers, by the name of a layer of PyG; a module is
            one layer at three places, and :obj:`None` leaves them out. (default: :obj:`"batch_norm"`)
        norm_kwargs (Dict[str, Any], optional): Arguments of the normalization layers. (default: :obj:`None`)
        attn (str, optional): :obj:`"performer"` for :class:`RelativePerformerConv`, whose weights depend on content, or
            :obj:`"ewald"` for :class:`EwaldAttention`, whose weights are kernels of the distance.
            (default: :obj:`"performer"`)
        attn_kwargs (Dict[str, Any], optional): Arguments of the attention. :obj:`"ewald"` needs a :obj:`width`; see
            :func:`ewald_settings`. With several heads, which share kernels, its :obj:`num_gaussians` and
            :obj:`num_coulomb` are 2 if not given. Of :class:`RelativePerformerConv`, if not given, :obj:`method` is
            :obj:`"pairs"`: exact attention, as in :class:`~torch_geometric.nn.conv.GPSConv`, with one warning if graphs
            are so large that random features take much less time. Pass :obj:`"features"` for graphs of thousands of
            nodes. For points off a grid pass :obj:`offset` and :obj:`cutoff`, and in 3-D :obj:`pos_dim`, too.
            (default: :obj:`None`)

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, C)`, edge indices :math:`(2, |\mathcal{E}|)`, edge features
          :math:`(|\mathcal{E}|, D)` *(optional)*, positions :math:`(|\mathcal{V}|, \mathrm{pos\_dim})`
        - **output:** node features :math:`(|\mathcal{V}|, C)`

    Example:
        >>> import torch
        >>> from torch_geometric.nn import MLP, GINEConv
        >>> conv = GINEConv(MLP([16, 16, 16]), edge_dim=4)
        >>> attention = {"pos_dim": 3, "offset": "distance", "cutoff": 2.0, "edge_dim": 4}
        >>> block = RelativeGPSBlock(16, conv, heads=4, attn_kwargs=attention)
        >>> bonds = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> block(torch.randn(3, 16), bonds, edge_attr=torch.randn(4, 4), pos=torch.rand(3, 3)).shape
        torch.Size([3, 16])
    """

    old_arguments: ClassVar = {
        "act_kwargs": "act takes the activation itself, as torch.nn.LeakyReLU(0.2)",
        "attn_type": "it is attn here, 'performer' (exact pairs, or random features) or 'ewald'",
    }

    def __init__(
        self, channels: checks.Count, conv: torch.nn.Module | None, heads: int = 1, *,
        dropout: checks.Probability = 0.0, act: str | torch.nn.Module = "relu",
        norm: str | torch.nn.Module | None = "batch_norm", norm_kwargs: dict[str, Any] | None = None,
        attn: Literal["performer", "ewald"] = "performer", attn_kwargs: dict[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__()
        attn_kwargs = attn_kwargs or {}
        self.channels, self.heads, self.dropout, self.conv, self.attn = channels, heads, dropout, conv, attn
        self.attention: Any
        if attn == "ewald":
            if "width" not in attn_kwargs:
                raise ValueError(f"attn_kwargs must have a width with attn='ewald', got {attn_kwargs!r}")
            kernels = {"num_gaussians": 2, "num_coulomb": 2} if heads > 1 else {}
            self.attention = EwaldAttention(channels, channels, heads=heads, **{**kernels, **attn_kwargs})
        else:
            self.attention = RelativePerformerConv(channels, channels, heads, **{"method": "pairs", **attn_kwargs})
            if "method" not in attn_kwargs:
                self.attention.attention.suggests = "features"
        activation = _resolved("act", activation_resolver, act, None)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(channels, 2 * channels),
            activation,
            torch.nn.Dropout(dropout),
            torch.nn.Linear(2 * channels, channels),
            torch.nn.Dropout(dropout),
        )
        norms = [_resolved("norm", normalization_resolver, norm, norm_kwargs, channels) for _ in range(3)]
        self.norm1, self.norm2, self.norm3 = norms if conv is not None else (None, *norms[1:])
        self._made = {"act": _described(activation, None), "norm": _described(norms[0], norm_kwargs)}
        self._conv_takes = _named(conv, ("edge_attr", "pos", "batch"))
        self._conv_names = None if conv is None else _arguments(conv)
        self._features_in_attention = attn == "performer" and self.attention.attention.needs.edge_dim is not None
        self._norm_takes = _named(norms[0], ("batch", "batch_size"))

    def settings(self) -> dict[str, Any]:
        return self._made

    def reset_parameters(self):
        """Resets all learnable parameters of the module, and draws the random features again."""
        reset_children(self)

    def forward(
        self, x: Tensor, edge_index: Adj | None = None, batch: Tensor | None = None, edge_attr: Tensor | None = None,
        pos: Tensor | None = None, *, edge_offset: Tensor | None = None, cell: Tensor | None = None,
        pbc: Tensor | None = None, ptr: Tensor | None = None, batch_size: int | None = None,
        max_num_nodes: int | None = None, neighbors: NeighborList | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor or EdgeIndex, optional): The edges: messages pass along them, and
                they are the near pairs of the attention. Without edges and :obj:`conv`, near pairs are found from
                :obj:`pos`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph index of nodes, in any order; :obj:`None` means one graph.
                (default: :obj:`None`)
            edge_attr (torch.Tensor, optional): The edge features, for :obj:`conv`, and with :obj:`edge_dim` for the
                attention. (default: :obj:`None`)
            pos (torch.Tensor, optional): The positions of nodes. (default: :obj:`None`)
            edge_offset (torch.Tensor, optional): Offsets :math:`\mathbf{p}_j - \mathbf{p}_i` of the edges, in a
                periodic graph or in place of :obj:`pos`. Where :obj:`pos` is given, too, they must be its differences,
                up to whole lattice vectors if :obj:`cell` is given. Not with :obj:`attn="ewald"`, which takes
                distances from :obj:`pos` and :obj:`cell`. (default: :obj:`None`)
            cell (torch.Tensor, optional): The lattice vectors of periodic graphs as rows, :math:`(d, d)` or
                :math:`(|\mathcal{G}|, d, d)`. (default: :obj:`None`)
            pbc (torch.Tensor, optional): With :obj:`attn="ewald"`, the lattice vectors along which graphs repeat, bool
                :math:`(d)` or :math:`(|\mathcal{G}|, d)`. :obj:`None` means all that are not zero.
                (default: :obj:`None`)
            ptr (torch.Tensor, optional): Index of the first node of each graph, in place of :obj:`batch`.
                (default: :obj:`None`)
            batch_size (int, optional): The number of graphs; :meth:`torch.compile` needs it. (default: :obj:`None`)
            max_num_nodes (int, optional): Upper bound of the nodes of a graph; :meth:`torch.compile` needs it.
                (default: :obj:`None`)
            neighbors (NeighborList, optional): Near pairs of the attention in place of the edges, from
                :meth:`neighbors`: shared among blocks, or different from the edges, for example across the border of a
                periodic cell. (default: :obj:`None`)
            **kwargs (optional): Additional arguments of :obj:`conv`, such as :obj:`edge_weight`.
        """
        check_nodes(x, self.channels)
        if self.conv is None and kwargs:
            raise ValueError(f"{', '.join(kwargs)} must not be given where conv is None")
        unknown = [name for name in kwargs if self._conv_names is not None and name not in self._conv_names]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} must not be given: neither this block nor {self.conv} takes it")
        if self.conv is not None and edge_index is None:
            raise ValueError(f"edge_index must be given: {self.conv} passes messages along edges")
        batch, batch_size = batch_of(batch, ptr, x.shape[0], batch_size)
        nodes = {"pos": pos, "batch": batch, "batch_size": batch_size, "max_num_nodes": max_num_nodes}
        near: dict[str, Any] = {}
        if self.attn == "ewald":
            check_sources(edge_index, edge_attr, None, None, None)
            if batch is None and edge_index is not None:
                self.attention.warn_of_hidden_batch(edge_index, x.shape[0])
            for name, other in {"edge_offset": edge_offset, "neighbors": neighbors}.items():
                if other is not None:
                    why = "which takes distances from pos and cell; give features of edges to conv as edge_attr"
                    raise ValueError(f"{name} must be None with attn='ewald', {why}")
            out = self.attention(x, cell=cell, pbc=pbc, **nodes)
        else:
            check_sources(edge_index, edge_attr, edge_offset, None, cell)
            if neighbors is not None:
                check_sources(None if self.conv is not None else edge_index, None, edge_offset, neighbors, cell)
            if pbc is not None:
                raise ValueError("pbc must be None with attn='performer': edge_offset says where edges cross borders")
            near = {"neighbors": neighbors}
            if neighbors is None and edge_index is not None:
                near = self._attention_edges(edge_index, edge_attr, x.shape[0])
                near |= {"edge_offset": edge_offset, "cell": cell}
            out = self.attention(x, **near, **nodes)
        if not x.shape[0]:  # norms refuse batches without nodes
            return with_zero_gradients(self, out)
        out = torch.nn.functional.dropout(out, self.dropout, self.training)
        out = self._normalised(self.norm2, x + out, batch, batch_size)
        given = {"edge_attr": edge_attr, "pos": pos, "batch": batch}
        given = {name: given[name] for name in self._conv_takes if given[name] is not None}
        if edge_attr is not None and "edge_attr" not in given and near.get("edge_attr") is None:
            why = "without edge_dim" if neighbors is None else "with neighbors, which have their own"
            raise ValueError(f"edge_attr must be None: neither {self.conv} nor, {why}, attention takes it")
        if self.conv is not None:
            local = self.conv(x=x, edge_index=edge_index, **given, **kwargs)
            if local.shape != x.shape:
                raise ValueError(
                    f"conv must return {tuple(x.shape)}, as x is, got {tuple(local.shape)} from {self.conv}"
                )
            local = torch.nn.functional.dropout(local, self.dropout, self.training)
            out = out + self._normalised(self.norm1, x + local, batch, batch_size)
        return self._normalised(self.norm3, out + self.mlp(out), batch, batch_size)

    def neighbors(
        self, edge_index: Adj, batch: Tensor | None = None, edge_attr: Tensor | None = None, pos: Tensor | None = None,
        *, edge_offset: Tensor | None = None, cell: Tensor | None = None, num_nodes: int,
    ) -> NeighborList | None:  # fmt: skip
        """Checks and sorts the edges for the attention, once for all blocks that share them. Not for
        :obj:`attn="ewald"`, which has no near pairs.

        The arguments are those of :meth:`forward`, and :obj:`num_nodes` is the number of nodes.
        """
        if self.attn == "ewald":
            raise ValueError("attn must be 'performer' for neighbors(), got 'ewald', which has no near pairs")
        edges = self._attention_edges(edge_index, edge_attr, num_nodes)
        return self.attention.neighbors(
            **edges, batch=batch, pos=pos, edge_offset=edge_offset, cell=cell, num_nodes=num_nodes
        )

    def _attention_edges(self, edge_index: Adj, edge_attr: Tensor | None, num_nodes: int) -> dict[str, Any]:
        """The edges and features that attention gets."""
        if not self._features_in_attention and is_sparse(edge_index):
            edge_index, _ = plain_edges(edge_index, None, num_nodes)  # without the values of the sparse matrix
        return {"edge_index": edge_index, "edge_attr": edge_attr if self._features_in_attention else None}

    def _normalised(
        self, norm: torch.nn.Module | None, x: Tensor, batch: Tensor | None, batch_size: int | None
    ) -> Tensor:
        if norm is None:
            return x
        given = {"batch": batch, "batch_size": None if batch is None else batch_size}
        return norm(x, **{name: given[name] for name in self._norm_takes if given[name] is not None})

    def __repr__(self) -> str:
        attn = f", attn={self.attn!r}" if self.attn != "performer" else ""
        return f"{self.__class__.__name__}({self.channels}, conv={self.conv}, heads={self.heads}{attn})"


def _resolved(name: str, resolver: Callable, query: Any, kwargs: dict[str, Any] | None, *args: Any) -> Any:
    """Make a layer from its name by a resolver of PyG. Raise ValueError that names the argument if PyG cannot."""
    try:
        return resolver(query, *args, **(kwargs or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must make a layer, got {query!r} with {kwargs!r}: {error}") from None


def _described(made: Any, arguments: dict[str, Any] | None) -> str:
    """A module, or a function, and arguments of its own as a text that is the same in every process."""
    name = repr(made) if isinstance(made, torch.nn.Module) else getattr(made, "__qualname__", type(made).__name__)
    return f"{name} with {arguments}" if arguments else name


def _named(module: torch.nn.Module | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are arguments of a module's ``forward``."""
    if module is None:
        return ()
    taken = _arguments(module)
    return tuple(name for name in names if (name == "edge_attr" if taken is None else name in taken))


def _arguments(module: torch.nn.Module) -> set[str] | None:
    """The names of the arguments of a module's ``forward``; :obj:`None` if it takes any name."""
    taken = inspect.signature(module.forward).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else set(taken)
