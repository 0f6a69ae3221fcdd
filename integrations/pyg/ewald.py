"""Ewald attention between nodes with positions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import Linear

from tg_equiattn import checks
from tg_equiattn.graphs.node_batch import inverse, known_sorted
from tg_equiattn.linear.positions import FarOffsets
from tg_equiattn.modules import NotScriptable, reset_children, with_zero_gradients
from tg_equiattn.nn import EwaldAttention as CoreAttention

from .conv import WarnsOfHiddenBatch, batch_of, check_nodes

_SAMPLE, _WIDE = 16, 16  # graphs and channels from which settings are read


@checks.arguments_of(CoreAttention, "out_channels")
class EwaldAttention(WarnsOfHiddenBatch, NotScriptable, nn.Module):
    r"""Global attention weighted by Gaussian and Coulomb kernels of the distance, in molecules, planar and periodic
    graphs of any size.

    .. math::
        (\mathbf{y}_i, \mathbf{u}_i) = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\,
        \langle \mathbf{q}_i, \mathbf{k}_j \rangle_c\, \mathbf{W} \big[ \mathbf{v}_j \otimes s_c^l\, Y_l(\nabla)
        K_c(\mathbf{p}_i - \mathbf{p}_j) \big], \qquad
        \mathbf{x}^{\prime}_i = \mathbf{y}_i + \mathbf{W}_u\, \frac{\mathbf{g}_i}{(1 + \mathbf{g}_i^2)^{1/4}}

    This is :class:`tg_equiattn.nn.EwaldAttention`, which describes accuracy, symmetries and sources. Queries, keys and
    values are linear maps of the input, :math:`K_c` are kernels of learned widths :math:`s_c`, and :math:`Y_l` solid
    harmonics. With Coulomb kernels, sums are potentials :math:`\mathbf{y}` and fields :math:`\mathbf{u}` of learned
    charges. Inner products :math:`\mathbf{g}` of the vectors :math:`\mathbf{u}` of a node join its output by a linear
    map, which starts at zero. The sum includes the node itself and, in periodic graphs, all images of all nodes. There
    is no residual connection.

    Outputs do not change when the positions and the cell of a graph are translated, rotated or reflected; vectors
    rotate with them. They are smooth functions of positions and cells. Positions in two dimensions are points of a
    plane in space: kernels are those of space.

    Use it where nodes act on each other by their distance, as charges do. Use :class:`RelativePerformerConv` where
    nodes choose each other by content.

    As :obj:`conv` of :class:`~torch_geometric.nn.conv.GPSConv` it passes over the edges: call
    :obj:`gps(x, edge_index, batch, pos=pos, ptr=ptr)`, as :class:`~torch_geometric.nn.conv.GPSConv` does not pass
    :obj:`batch` on.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size from the first input, which a
            linear map then takes to :obj:`out_channels`.
        out_channels (int): Size of each output sample.
        width (float): Width of the narrowest kernel, in the unit of :obj:`pos`. Use about half of the cutoff of
            message passing beside it: messages already model shorter distances.
        in_vectors (int, optional): Number of input vectors of each node. (default: :obj:`0`)
        out_vectors (int, optional): Number of vectors of each node that are computed. With :obj:`0`, outputs have no
            inner products of vectors; pass :obj:`lmax=0`, too, if there are no input vectors. (default: :obj:`8`)
        max_width (float, optional): Width of the widest kernel. It is at least twice :obj:`width`. Each width is
            learned within an octave of its own between the two. In small cells use less than half a side. :obj:`None`
            means :obj:`8 * width`. (default: :obj:`None`)
        num_gaussians (int, optional): Number of Gaussian kernels. (default: :obj:`4`)
        num_coulomb (int, optional): Number of Coulomb kernels, which decay as 1 / r. Use :obj:`0` if nothing acts as
            far as charges do. (default: :obj:`4`)
        kernels (torch.nn.Module, optional): Module with kernels of your own, beside the others. It has an integer
            :obj:`count`, and called with gains :obj:`(heads, count, lmax + 1)` it returns a
            :class:`tg_equiattn.functional.Kernel` with these gains. The layer keeps a copy. (default: :obj:`None`)
        heads (int, optional): Number of attention heads, each with its own queries and keys and a share of the values.
            They share kernels. (default: :obj:`1`)
        lmax (int, optional): Highest degree of the solid harmonics. (default: :obj:`1`)
        output_scale (float, optional): Constant by which sums are divided, the same for all graphs: the size of
            outputs of a new layer with 1, which :func:`ewald_settings` reads. (default: :obj:`1.0`)
        error (float, optional): Promised error of sums over reciprocal vectors, relative to the largest value of a
            kernel. Use :obj:`1e-2` to train faster. (default: :obj:`1e-4`)
        method (str, optional): :obj:`"direct"` sums over all pairs of nodes, in graphs that do not repeat.
            :obj:`"ewald"` sums over reciprocal vectors. :obj:`"nufft"` does so by non-uniform fast Fourier transforms,
            which need the extra :obj:`nufft`. :obj:`"auto"` chooses for every graph: direct sums if it is open, and
            reciprocal sums if it repeats. In a wide cell with few nodes, parts of kernels that decay fast are summed
            over pairs and their nearest images. From some thousand nodes on, non-uniform transforms are used where they
            are installed and faster. (default: :obj:`"auto"`)
        max_hkl (Sequence[int], optional): Largest Miller indices along the three lattice vectors, for the kernel with
            the largest cutoff. If given, cells are not read, which :meth:`torch.compile` needs. (default: :obj:`None`)

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, positions :math:`(|\mathcal{V}|, d)` with
          :math:`d` 2 or 3, graph indices :math:`(|\mathcal{V}|)` *(optional)*, vectors
          :math:`(|\mathcal{V}|, V_{in}, d)` *(with* :obj:`in_vectors` *)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, with :obj:`return_vectors` and vectors
          :math:`(|\mathcal{V}|, V_{out}, d)`

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one.

    Example:
        >>> import torch
        >>> attention = EwaldAttention(16, 16, width=1.0, output_scale=20)
        >>> batch = torch.tensor([0] * 5 + [1] * 7)
        >>> cell = 4 * torch.eye(3).expand(2, 3, 3)
        >>> pbc = torch.tensor([[False, False, False], [True, True, True]])
        >>> attention(torch.randn(12, 16), torch.randn(12, 3), batch, cell=cell, pbc=pbc).shape
        torch.Size([12, 16])
    """

    old_arguments = CoreAttention.old_arguments

    def __init__(
        self, in_channels: checks.LazyCount, out_channels: checks.Count, *, in_vectors: checks.Whole = 0,
        out_vectors: checks.Whole = 8, **settings: Any,
    ):  # fmt: skip
        super().__init__()
        if out_vectors and not in_vectors and settings.get("lmax") == 0:
            raise ValueError(f"out_vectors must be 0 with lmax=0 and in_vectors=0, got {out_vectors}: pass lmax=1")
        self.lin, self.out_channels = Linear(-1, out_channels, False) if in_channels == -1 else None, out_channels
        self.in_vectors, self.out_vectors, channels = in_vectors, out_vectors, out_channels if self.lin else in_channels
        self.attention = CoreAttention(channels, in_vectors, out_channels=(out_channels, out_vectors), **settings)
        self.heads = self.attention.heads
        self.invariants = FarOffsets(out_vectors, 3, out_channels, invariant=True) if out_vectors else None
        self.register_forward_pre_hook(_without_edges, with_kwargs=True)

    @property
    def in_channels(self) -> int:
        """Size of each input sample; -1 if it is not known yet."""
        return self.lin.in_channels if self.lin is not None else self.attention.in_channels[0]

    def reset_parameters(self):
        """Resets all learnable parameters of the module."""
        reset_children(self)

    def forward(
        self, x: Tensor, pos: Tensor, batch: Tensor | None = None, *, vectors: Tensor | None = None,
        cell: Tensor | None = None, pbc: Tensor | None = None, ptr: Tensor | None = None, batch_size: int | None = None,
        max_num_nodes: int | None = None, return_vectors: bool = False,
    ) -> Any:  # fmt: skip
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features, :math:`(|\mathcal{V}|, F_{in})`.
            pos (torch.Tensor): The positions of nodes, :math:`(|\mathcal{V}|, d)`, wrapped into the cell or not. Give
                large coordinates in float64, whatever the features are.
            batch (torch.Tensor, optional): The graph index of nodes, in any order; :obj:`None` means one graph.
                (default: :obj:`None`)
            vectors (torch.Tensor, optional): The input vectors of nodes, :math:`(|\mathcal{V}|, V_{in}, d)`, with
                :obj:`in_vectors`. (default: :obj:`None`)
            cell (torch.Tensor, optional): The lattice vectors of periodic graphs as rows, :math:`(d, d)`,
                :math:`(|\mathcal{G}|, d, d)` or :math:`(d |\mathcal{G}|, d)`. (default: :obj:`None`)
            pbc (torch.Tensor, optional): Bool :math:`(d)`, :math:`(|\mathcal{G}|, d)` or :math:`(d |\mathcal{G}|)`, the
                lattice vectors along which graphs repeat: three, two or none. :obj:`None` means all that are not
                zero. (default: :obj:`None`)
            ptr (torch.Tensor, optional): Index of the first node of each graph, in place of :obj:`batch`.
                (default: :obj:`None`)
            batch_size (int, optional): The number of graphs; :meth:`torch.compile` needs it. (default: :obj:`None`)
            max_num_nodes (int, optional): Upper bound of the nodes of a graph; :meth:`torch.compile` needs it.
                (default: :obj:`None`)
            return_vectors (bool, optional): If set to :obj:`True`, will additionally return the vectors,
                :math:`(|\mathcal{V}|, V_{out}, d)`. (default: :obj:`False`)
        """
        check_nodes(x, self.in_channels)
        if self.in_channels != -1 and x.shape[1] != self.in_channels:  # compilers find no symbol in a tuple
            raise ValueError(f"x must have shape (N, {self.in_channels}), got {tuple(x.shape)}")
        if return_vectors and not self.out_vectors:
            raise ValueError("return_vectors must be False with out_vectors=0, got True: pass out_vectors=1 or more")
        batch, batch_size = batch_of(batch, ptr, x.shape[0], batch_size)
        nodes = x.shape[0]
        if not isinstance(pos, Tensor) or pos.ndim != 2 or pos.shape[0] != nodes or pos.shape[1] not in (2, 3):
            raise ValueError(f"pos must have shape ({nodes}, 2) or ({nodes}, 3), got {checks.shape_of(pos)}")
        dim = pos.shape[1]
        if (vectors is None) != (self.in_vectors == 0):
            allowed = f"given, of shape (N, {self.in_vectors}, {dim})" if self.in_vectors else "None with in_vectors=0"
            raise ValueError(f"vectors must be {allowed}, got {checks.shape_of(vectors)}")
        if vectors is not None and tuple(vectors.shape) != (nodes, self.in_vectors, dim):
            raise ValueError(f"vectors must have shape {(nodes, self.in_vectors, dim)}, got {tuple(vectors.shape)}")
        order = None
        if batch is not None and not known_sorted(batch):
            batch, order = batch.sort(stable=True)
            x, pos = x[order], pos[order]
            vectors = vectors if vectors is None else vectors[order]
        x = x if self.lin is None else self.lin(x)
        if dim == 2:
            pos, (cell, pbc) = nn.functional.pad(pos, (0, 1)), in_space(cell, pbc)
            vectors = vectors if vectors is None else nn.functional.pad(vectors, (0, 1))
        out, found = self.attention(
            x, vectors, pos=pos, batch=batch, cell=cell, pbc=pbc, batch_size=batch_size, max_num_nodes=max_num_nodes
        )
        if self.invariants is not None:
            out = out + self.invariants(found.transpose(0, 1))
        if not x.shape[0]:
            out = with_zero_gradients(self, out)
        if order is not None:
            back = inverse(order)
            out, found = out[back], found[back]
        return (out, found[..., :dim]) if return_vectors else out

    def __repr__(self) -> str:
        vectors = f", in_vectors={self.in_vectors}" if self.in_vectors else ""
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads}, "
            f"width={self.attention.width:g}{vectors})"
        )


def _without_edges(layer: EwaldAttention, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call as :class:`~torch_geometric.nn.conv.GPSConv` makes it, with edges in second place and
    ``pos`` by name, without the edges."""
    if len(arguments) == 2 and "pos" in named:
        x, edge_index = arguments
        if isinstance(x, Tensor) and named.get("batch") is None and named.get("ptr") is None:
            layer.warn_of_hidden_batch(edge_index, len(x))
        arguments = (x,)
    return arguments, named


def in_space(cell: object, pbc: object) -> tuple[Any, Any]:
    """Lattice vectors of a plane, and directions along which it repeats, in space."""
    if cell is not None:
        if not isinstance(cell, Tensor) or cell.ndim not in (2, 3) or cell.shape[-1] != 2 or cell.numel() % 4:
            wanted = "(2, 2), (graphs, 2, 2) or (2 graphs, 2) where pos has 2 dimensions"
            raise ValueError(f"cell must be {wanted}, got {checks.shape_of(cell)}")
        cell = nn.functional.pad(cell.reshape(-1, 2, 2), (0, 1, 0, 1))
    if pbc is not None:
        if not isinstance(pbc, Tensor) or pbc.ndim not in (1, 2) or pbc.numel() % 2:
            wanted = "bool (2,), (graphs, 2) or (2 graphs,) where pos has 2 dimensions"
            raise ValueError(f"pbc must be {wanted}, got {checks.shape_of(pbc)}")
        pbc = nn.functional.pad(pbc.reshape(-1, 2), (0, 1))
    return cell, pbc


@torch.no_grad()
def ewald_settings(graphs: Sequence[Data], **attn_kwargs: Any) -> dict[str, Any]:
    r"""Reads settings of :class:`EwaldAttention` from a data set, with which outputs of a new layer are of unit size.

    - :obj:`width` is the mean length of edges.
    - :obj:`max_width`, in periodic graphs, is at most half of the shortest lattice vector, but at least twice the
      width: Gaussians wider than a cell sum all its images.
    - :obj:`output_scale` is the root mean square of outputs of a new layer with :obj:`output_scale=1`, for inputs
      that are normal random numbers. It depends on all other settings, since terms of different nodes have different
      signs and sizes.

    They are read from up to 16 graphs, evenly spaced in the data set.

    Args:
        graphs (Sequence[Data]): The training graphs, with :obj:`pos`, and :obj:`cell` and :obj:`pbc` if they are
            periodic. For the width they need edges, and across borders :obj:`edge_offset`.
        **attn_kwargs (optional): Settings of the layer to keep, such as :obj:`width`.

    Returns:
        Dict[str, Any]: All settings, to pass to the layer or as :obj:`attn_kwargs`.

    Raises:
        ValueError: If there are no graphs, or a graph lacks positions, edges or offsets across borders.

    Example:
        >>> import torch
        >>> chain = torch.stack([torch.arange(9), torch.arange(1, 10)])
        >>> graphs = [Data(pos=torch.randn(10, 3).cumsum(0), edge_index=chain) for _ in range(3)]
        >>> sorted(ewald_settings(graphs, num_coulomb=2, error=1e-2))
        ['error', 'num_coulomb', 'output_scale', 'width']
    """
    if not len(graphs):
        raise ValueError("graphs must be a data set with graphs, got none")
    some = [graphs[n] for n in range(0, len(graphs), -(-len(graphs) // _SAMPLE))]
    for data in some:
        if data.get("pos") is None:
            raise ValueError(f"graphs must have pos, got {data}")
    if "width" not in attn_kwargs:
        lengths = torch.cat([_edge_lengths(data) for data in some])
        if not len(lengths):
            raise ValueError("graphs must have edges, whose mean length is the width, got none; or pass width")
        attn_kwargs["width"] = float(lengths.mean())
    width, sides = attn_kwargs["width"], [x for data in some for x in _sides(data)]
    if sides and "max_width" not in attn_kwargs:
        attn_kwargs["max_width"] = max(2 * width, min(8 * width, *(side / 2 for side in sides)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, square, count = EwaldAttention(_WIDE, _WIDE, **{**attn_kwargs, "output_scale": 1.0}), 0.0, 0
        for data in some:
            given = {name: data[name].cpu() for name in ("cell", "pbc") if name in data}
            pos = data.pos.cpu()
            vectors = torch.randn(len(pos), layer.in_vectors, pos.shape[1]) if layer.in_vectors else None
            out = layer(torch.randn(len(pos), _WIDE), pos, vectors=vectors, **given)
            square, count = square + float(out.double().square().sum()), count + out.numel()
    if not square:
        raise ValueError("graphs must have nodes, got none")
    return attn_kwargs | {"output_scale": (square / count) ** 0.5}


def _edge_lengths(data: Data) -> Tensor:
    """Lengths of the edges of a graph."""
    if data.get("edge_index") is None:
        raise ValueError(f"graphs must have edge_index, got {data}: make edges, or pass width")
    offsets = data.get("edge_offset")
    if offsets is None:
        if _sides(data):
            wanted = "edge_offset, as PeriodicRadiusGraph makes it: edges may cross the border of the cell"
            raise ValueError(f"graphs with a cell must have {wanted}; or pass width, got {data}")
        source, target = data.edge_index
        offsets = data.pos[source] - data.pos[target]
    return offsets.double().norm(dim=1).cpu()


def _sides(data: Data) -> list[float]:
    """Lengths of the lattice vectors along which a graph repeats."""
    cell, pbc = data.get("cell"), data.get("pbc")
    if cell is None:
        return []
    lengths = cell.reshape(-1, cell.shape[-1]).double().norm(dim=1)
    repeats = lengths > 0 if pbc is None else pbc.flatten()
    return lengths[repeats].tolist()
