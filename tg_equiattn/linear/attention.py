"""Attention in linear time with relative positions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.neighbors import NeighborList
from ..graphs.node_batch import NodeBatch
from ..grids import PixelGrid
from ..modules import LayerNorm, NotScriptable, StoresSettings, reset_children, with_zero_gradients
from ..shapes import Float
from ..torch_state import full_precision, is_traced
from .linear_attention import Inputs
from .nodes import Needs, Nodes, read_nodes
from .positions import (
    CUTOFF,
    ClippedPosition,
    FarOffsets,
    FeatureVariance,
    Position,
    SinusoidPosition,
    WindowPosition,
)
from .random_features import DrawsFeatures, RandomFeatures

# annotations of arguments
PositionName = Literal["window", "clipped", "sinusoid"]
Offset = Literal["table", "mlp", "distance"]
Values = Literal["content", "offset", "far"]
Method = Literal["features", "pairs"]
KEY_CHANNELS = 3  # largest default number; with few channels random features have small errors
FEATURES = 64  # smallest default number of random features; docs/graph_settings.md has their error
PAIRS = 2  # method="pairs" is faster for graphs of up to this many nodes for each random feature; see the same page
MANY_PAIRS = 8  # method="features" is much faster for graphs of more nodes than this for each random feature


def _linear(in_channels: int, out_channels: int) -> nn.Linear:
    """A linear map without bias; ``in_channels`` -1 reads the width from the first input."""
    return nn.LazyLinear(out_channels, False) if in_channels == -1 else nn.Linear(in_channels, out_channels, False)


class KeyBias(nn.Linear):
    """A linear map to one number for each head. It starts at zero: models whose biases start at random are less
    accurate in graphs larger than those of training."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class LazyKeyBias(nn.LazyLinear):
    """:class:`KeyBias` before its first input."""

    cls_to_become = KeyBias

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params():
            nn.init.zeros_(self.weight)


def _key_bias(in_channels: int, heads: int) -> nn.Linear:
    """A :class:`KeyBias`; ``in_channels`` -1 reads the width from the first input."""
    return LazyKeyBias(heads, False) if in_channels == -1 else KeyBias(in_channels, heads, False)


@checks.arguments
class PerformerAttention(NotScriptable, DrawsFeatures, StoresSettings):
    r"""Global attention in linear time by random features, with relative positions.

    .. math::
        \mathrm{out}_i = W_o \frac{\sum_j w_{ij} v_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^{a_j} \big(e^f \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i \text{ or } i] \exp(\langle q_i, k_j \rangle / \sqrt{d} + b(x_j - x_i))\big)

    These are the weights of ``position="window"``, with d the ``key_channels``, and b and f learned for each head. The
    bias a_j of a key is a linear map of its input that starts at zero. It is the part of the scores that is the same
    for all queries, which random features need not estimate then. There is none with ``method="pairs"``.

    The table has all kinds of positions; ``"clipped"`` and ``"sinusoid"`` are those of the Relative Performer's paper.
    They differ in the weights, here without the factor of the bias, and in whether outputs stay equal when all
    positions are translated:

    ============  ======================================================  ==========================================
    position      weight                                                  translation equivariance
    ============  ======================================================  ==========================================
    "window"      as above                                                exact for every draw of random features
    "clipped"     half of the heads :math:`\langle \phi(q_i),             exact for every draw of random features
                  \phi(w_{d(i,j)}) \rangle`, the others as ``None``
    "sinusoid"    :math:`\langle \phi([q_i, q_p(x_i)]),                   in expectation over draws only; exact with
                  \phi([k_j, k_p(x_j)]) \rangle`                          ``method="pairs"``
    ``None``      :math:`\langle \phi(q_i), \phi(k_j) \rangle`            exact: positions are not used
    ============  ======================================================  ==========================================

    In ``"clipped"`` (strategy 2), :math:`d(i, j)` is the Manhattan distance, at most ``cutoff``, and w a learned table.
    In ``"sinusoid"`` (strategy 1), :math:`\langle q_p(x), k_p(x') \rangle` is a function of :math:`x - x'` with learned
    frequencies.

    With ``values="far"``, every head e attends to the offsets of all nodes, too, :math:`o_{ie} = \sum_j w_{ije} (x_j -
    x_i) / \sum_j w_{ije}`. A linear map of the :math:`o_{ie}` of all heads, in units of ``cutoff``, is added to the
    output. With ``offset="distance"`` the map is of their inner products between heads, so that outputs stay invariant
    to rotations. With ``values="offset"``, near pairs also add a learned function :math:`g(x_j - x_i)` to the value.

    Args:
        in_channels: Channels of the input. -1 reads them from the first input.
        out_channels: Channels of the output, a multiple of ``heads``.
        heads: Number of attention heads. Default 1.
        position: Kind of positions: ``"window"`` (default), ``"clipped"``, ``"sinusoid"`` or ``None``, see above. Use
            the default unless you reproduce the paper or your nodes have no positions.
        pos_dim: Dimension of positions. Default 2.
        cutoff: Pairs closer than this are near, in the unit of positions. Offsets are measured in units of it, too. It
            is a whole number for ``offset="table"`` and ``position="clipped"``, where distances are Manhattan, and a
            real number otherwise, where they are Euclidean. Twice :func:`tg_equiattn.graphs.mean_edge_length` suits
            most graphs. Default ``None``: 6, but ``offset="mlp"`` and ``"distance"`` need a value, and with
            ``offset=None`` it must be ``None``.
        offset: Bias of near pairs: a ``"table"`` over whole offsets, for grids (default); an ``"mlp"`` of the offset,
            for points off a grid; a smooth function of the ``"distance"``, which is invariant to rotations and
            vanishes at ``cutoff``; or ``None``, one number for each head, for edges between nodes without positions.
            Only for ``position="window"``; but with ``position=None``, ``"distance"`` makes the far offsets of
            ``values`` invariant to rotations.
        values: ``"content"`` (default); ``"offset"`` to attend to the offsets of all nodes, too, and to add a function
            of the offset to the values of near pairs; or ``"far"`` for the offsets of all nodes alone, which is faster.
            Use ``"offset"`` where outputs depend on where other nodes are, and ``"far"`` if messages run along the near
            pairs already. Only for ``position="window"`` and ``None``, which has no near pairs.
        key_channels: Channels d of queries and keys of each head. Few channels make random features much more exact,
            and attention can then be sharp; use about the number of properties by which nodes choose each other.
            Default ``None``: at most 3 with ``method="features"`` and ``position="window"`` or ``None``; otherwise as
            many as values have, ``out_channels // heads``.
        edge_dim: Number of features of a near pair. A linear map of them is added to its score. Default ``None``: near
            pairs have no features. Only for ``position="window"``.
        num_random_features: Number m of random features. More are more exact and slower. Their directions come in
            opposite pairs and have a variance that each head learns. Default ``None``: :math:`\max(64, \lfloor d \ln d
            \rfloor)`.
        method: ``"features"`` estimates :math:`\exp(\langle q_i, k_j \rangle / \sqrt{d})` in linear time. ``"pairs"``
            computes it for all pairs of a graph, in quadratic time; use it for graphs of up to some hundred nodes. The
            two are different functions: a trained layer keeps its method. Default ``None``: ``"features"``, with one
            warning if the first graphs have at most 2 m nodes, for which pairs are exact and faster.
        dropout: Probability of dropping weights in training: single ones of near pairs, and of all pairs with
            ``method="pairs"``; whole keys of random features. Default 0.

    Shapes:
        dense ``(B, N, in_channels)`` -> ``(B, N, out_channels)``; ragged ``(N, in_channels)`` -> ``(N, out_channels)``.

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one.

    Source: Choromanski et al. (2021) for the features, Likhosherstov et al. (2022) for their variance;
    relative-performer section 2.3 for ``"sinusoid"`` (strategy 1) and ``"clipped"`` (strategy 2, here with a weight
    :math:`w_0` for a node with itself). Near pairs and the values of offsets are ours.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> layer = PerformerAttention(16, 32, heads=4, cutoff=3, method="pairs")
        >>> layer(torch.randn(2, 35, 16), grid=PixelGrid((5, 7), cutoff=3)).shape
        torch.Size([2, 35, 32])
    """

    def __init__(
        self, in_channels: checks.LazyCount, out_channels: checks.Count, heads: checks.Count = 1, *,
        position: PositionName | None = "window", pos_dim: checks.Count = 2, cutoff: checks.Positive | None = None,
        offset: Offset | None = "table", values: Values = "content", key_channels: checks.Count | None = None,
        edge_dim: checks.Count | None = None, num_random_features: checks.Count | None = None,
        method: Method | None = None, dropout: checks.Probability = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if out_channels % heads:
            raise ValueError(f"heads must divide out_channels={out_channels}, got {heads}")
        self.out_channels, self.heads, self.head_channels = out_channels, heads, out_channels // heads
        self.position, self.pos_dim, self.offset, self.values = position, pos_dim, offset, values
        self.method, self.dropout = method or "features", dropout
        few = self.method == "features" and position in ("window", None)
        self.key_channels = d = key_channels or min(KEY_CHANNELS if few else self.head_channels, self.head_channels)
        self.positions = self._make_position(cutoff, edge_dim, method)
        self.needs, keys, self.far_offsets = self.positions.needs, self.positions.key_heads, None
        self.cutoff = self.needs.cutoff
        if values != "content":
            self.needs = self.needs._replace(positions=True, far_offsets=True)
            self.far_offsets = FarOffsets(heads, pos_dim, out_channels, offset == "distance")
        self.query = _linear(in_channels, heads * d)
        self.key = _linear(in_channels, keys * d) if keys else None
        self.key_bias = _key_bias(in_channels, keys) if keys and self.method == "features" else None
        self.value = _linear(in_channels, out_channels)
        self.out = nn.Linear(out_channels, out_channels)
        self.features: RandomFeatures | None = None
        self.suggests = "pairs" if method is None and position != "clipped" else None
        if self.method == "features":
            count = max(FEATURES, int(d * math.log(d))) if num_random_features is None else num_random_features
            dim = d + self.positions.extra_channels
            self.features = RandomFeatures(count, dim, paired=True)
            self.positions.variance = FeatureVariance(keys, dim) if keys else None

    def _make_position(self, cutoff: float | None, edge_dim: int | None, method: str | None) -> Position:
        """The module of the kind of positions. Raise ValueError for settings that do not fit or are not used."""
        position, offset, values, heads = self.position, self.offset, self.values, self.heads
        if position != "window":
            offsets = ("table", "distance") if position is None and values != "content" else ("table",)
            for name, value, allowed in (("offset", offset, offsets), ("edge_dim", edge_dim, (None,))):
                if value not in allowed:
                    raise ValueError(
                        f"{name} must be {' or '.join(map(repr, allowed))} with position={position!r}, got {value!r}; "
                        "near pairs need position='window', with offset=None for edges between nodes without positions"
                    )
        elif offset is None and values != "content":
            raise ValueError(f"values must be 'content' with offset=None, got {values!r}")
        if position in ("clipped", "sinusoid") and values != "content":
            raise ValueError(f"values must be 'content' with position={position!r}, got {values!r}")
        if position == "clipped" and method == "pairs":
            raise ValueError("method must be 'features' with position='clipped', got 'pairs'")
        cutoff = _cutoff(position, cutoff, offset)
        if position == "window":
            value_channels = self.head_channels if values == "offset" else None
            return WindowPosition(heads, self.pos_dim, cutoff, offset, value_channels, edge_dim)
        if position == "clipped":
            return ClippedPosition(heads, self.pos_dim, int(cutoff), self.key_channels)
        if position == "sinusoid":
            return SinusoidPosition(heads, self.pos_dim)
        return Position(Needs(self.pos_dim, cutoff), heads)

    @property
    def in_channels(self) -> int:
        """Channels of the input; -1 if they are not known yet."""
        weight = self.query.weight
        return -1 if isinstance(weight, nn.UninitializedParameter) else weight.shape[1]

    def settings(self) -> dict[str, Any]:
        used = (self.needs.neighbors and self.offset is not None) or self.far_offsets is not None
        return {
            "heads": self.heads, "pos_dim": self.pos_dim, "method": self.method, "values": self.values,
            "position": self.position, "offset": self.offset, "cutoff": self.cutoff if used else None,
        }  # fmt: skip

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, batch: Tensor | None = None, batch_size: int | None = None,
        max_num_nodes: int | None = None, pos: Tensor | None = None, grid: PixelGrid | None = None,
        neighbors: NeighborList | None = None, return_vectors: bool = False,
    ) -> Any:  # fmt: skip
        """Attend among the nodes of each graph.

        Args:
            x: Features, ``(B, N, in_channels)``, or ``(N, in_channels)`` with ``batch``.
            mask: Bool ``(B, N)``, true for valid nodes; for dense input only. Outputs of the others are zero. Default
                ``None``: all nodes are valid.
            batch: Graph index of each node, int64 ``(N,)`` in any order; for ragged input only. Default ``None``: one
                graph.
            batch_size: Number of graphs. Default ``None``: read from ``batch``, which torch.compile cannot.
            max_num_nodes: Upper bound of the nodes of a graph, for ``method="pairs"``. Default ``None``: read from
                ``batch``, which torch.compile cannot.
            pos: Positions, ``(B, N, pos_dim)`` or ``(N, pos_dim)``. Offsets are their differences, in their precision:
                give positions far from the origin in float64, whatever the dtype of ``x``.
            grid: Pixel grid whose pixels, in row order, are the nodes of every graph. It replaces ``batch``, ``pos``
                and ``neighbors``.
            neighbors: Near pairs among all nodes, numbered through the batch. Default ``None``: the pairs closer than
                ``cutoff``, found from ``pos``, at most 1,000 a node on average. Tables need offsets that are whole up
                to rounding. ``values="offset"`` needs differences of ``pos``: in a periodic box distant nodes have no
                unique offset.
            return_vectors: Also return the mean offsets :math:`o` of ``values="offset"`` or ``"far"``, ``(..., heads,
                pos_dim)``, in the unit of positions. With ``offset="distance"`` they rotate with the positions. Default
                ``False``.
        """
        channels = self.in_channels
        if x.ndim not in (2, 3) or (channels != -1 and x.shape[-1] != channels):
            raise ValueError(f"input must be (B, N, {channels}), or (N, {channels}) with batch, got {tuple(x.shape)}")
        if return_vectors and self.far_offsets is None:
            raise ValueError(
                "return_vectors must be False with values='content', got True: pass values='far', for "
                "position='window' or None"
            )
        checks.same_kind(x, self.query.weight)
        nodes = read_nodes(
            x, self.needs, mask, batch, batch_size, max_num_nodes, pos, grid, neighbors,
            whole=self.features is None,
        )  # fmt: skip
        if self.suggests is not None and not is_traced():
            self._suggest_method(nodes.node_batch)
        projection = variance = None
        if self.features is not None:
            projection = self.features(x.device, torch.promote_types(x.dtype, torch.float32))
        if not x.numel():  # after the features have counted the step, as on other processes
            for linear in (self.query, self.key, self.key_bias):
                if linear is not None:
                    linear(x)  # a lazy layer reads its width
            out = with_zero_gradients(self, self.out(self.value(x)))
            return (out, out.new_zeros(*x.shape[:-1], self.heads, self.pos_dim)) if return_vectors else out
        query, value = self._project(self.query, nodes.x), self._project(self.value, nodes.x, self.head_channels)
        key = query[:0] if self.key is None else self._project(self.key, nodes.x)
        key_bias = None if self.key_bias is None else self._project(self.key_bias, nodes.x, 1)
        if self.positions.variance is not None:
            variance = self.positions.variance()
        dropout = self.dropout if self.training else 0.0
        with full_precision(x.device):
            inputs = Inputs(query, key, value, projection, variance, key_bias, dropout).wide()
            if self.far_offsets is None:
                out = self.positions(inputs, nodes)
            else:
                out, vectors = self._means(inputs, nodes)
                of_vectors = self.far_offsets(vectors / self.needs.cutoff)
        out = self.out(out.to(value.dtype).transpose(0, 1).flatten(1))
        if self.far_offsets is not None:
            out = out + of_vectors.to(out.dtype)
        out = nodes.restore(out)
        return (out, nodes.restore(vectors.transpose(0, 1).to(self.out.weight.dtype))) if return_vectors else out

    def _means(self, inputs: Inputs, nodes: Nodes) -> tuple[Float[Tensor, "heads nodes e"], Tensor]:
        """Weighted means of values and of the offsets of all nodes, (heads, nodes, dim)."""
        value, centred = inputs.value, nodes.node_batch.centred(cast(Tensor, nodes.pos), detach=True)
        centred = centred.to(value.dtype)
        parts = [value, centred.expand(self.heads, -1, -1)]
        parts += [torch.ones_like(value[..., :1])] if inputs.dropout else []  # its mean is the sum of the kept weights
        joined = torch.cat([part.transpose(0, 1) for part in parts], -1).transpose(0, 1)  # as heads lie in memory
        means = self.positions(inputs._replace(value=joined), nodes)
        content, far, *kept = means.split([part.shape[-1] for part in parts], -1)
        return content, far - (centred * kept[0] if kept else centred)

    def _project(
        self, linear: nn.Linear, x: Float[Tensor, "nodes channels"], channels: int | None = None
    ) -> Float[Tensor, "heads nodes d"]:
        """A projection of nodes to heads of ``channels``, by default ``key_channels``."""
        return linear(x).unflatten(-1, (-1, channels or self.key_channels)).transpose(0, 1)

    def _suggest_method(self, node_batch: NodeBatch) -> None:
        """Warn, once, if the other method is faster for these graphs: pairs at the first call only, features at the
        first call for which they are much faster."""
        sizes = node_batch.known_sizes or [node_batch.nodes // max(1, node_batch.count)]
        average = sum(n * n for n in sizes) / max(1, sum(sizes))  # nodes in the graph of a node
        count = FEATURES if self.features is None else self.features.num_random_features
        if self.suggests == "pairs":
            why, found = f"exact and faster for graphs of up to {PAIRS * count} nodes", 0 < average <= PAIRS * count
            keep, self.suggests = "method='features' to keep random features", None
        else:
            why, found = f"much faster for graphs of more than {MANY_PAIRS * count} nodes", average > MANY_PAIRS * count
            keep, self.suggests = "method='pairs' to keep all pairs", None if found else "features"
        if found:
            method = "pairs" if self.features is not None else "features"
            warnings.warn(
                f"method={method!r} is {why}, and these have {average:.0f} on average: pass method={method!r}, or "
                f"{keep} without this warning (in RelativeGPSBlock: attn_kwargs)",
                stacklevel=4,
            )

    def extra_repr(self) -> str:
        kind = f"offset={self.offset!r}" if self.position == "window" else f"position={self.position!r}"
        values = "" if self.values == "content" else f", values={self.values!r}"
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, {kind}{values}"


def _cutoff(position: str | None, cutoff: float | None, offset: str | None) -> float:
    """The cutoff of a layer, or its default. Raise ValueError if it does not fit the kind of positions."""
    if offset is None:
        if cutoff is not None:
            raise ValueError(f"cutoff must be None with offset=None, got {cutoff}: edges are the near pairs")
        return 1.0
    if cutoff is None and offset != "table":
        raise ValueError(
            f"cutoff must be given with offset={offset!r}: a length in the unit of pos, for example "
            "2 * mean_edge_length(pos, edge_index) (tg_equiattn.graphs)"
        )
    cutoff = CUTOFF if cutoff is None else cutoff
    if position == "clipped" or (position == "window" and offset == "table"):
        if isinstance(cutoff, float):
            raise ValueError(
                "cutoff must be a positive integer with offset='table' and position='clipped', where distances are "
                f"counted, got {cutoff}; for points off a grid pass offset='distance' or 'mlp', "
                "and position='window'"
            )
        checks.positive(cutoff=cutoff)
    return cutoff


class MeanReadout(nn.Module):
    """Class scores from the mean over pixels, with a ``"layer"`` norm before it or a ``"batch"`` norm after it."""

    def __init__(self, channels: int, num_classes: int, norm: str = "layer") -> None:
        super().__init__()
        self.norm = LayerNorm(channels) if norm == "layer" else nn.Identity()
        self.mean_norm = nn.BatchNorm1d(channels) if norm == "batch" else nn.Identity()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Float[Tensor, "batch pixels channels"]) -> Float[Tensor, "batch num_classes"]:
        return self.head(self.mean_norm(self.norm(x).mean(1)))


class PerformerBlock(nn.Module):
    r"""Pre-norm block: :math:`x \leftarrow x + \mathrm{attention}(\mathrm{norm}\,x)`, then the same with a feed-forward
    part of four times the channels. The attention gets all further arguments of the call."""

    def __init__(self, attention: nn.Module, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.attention = LayerNorm(channels), attention
        self.feedforward_norm, self.dropout = LayerNorm(channels), nn.Dropout(dropout)
        self.feedforward = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(4 * channels, channels), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Float[Tensor, "... channels"], *args: Any, **kwargs: Any) -> Float[Tensor, "... channels"]:
        x = x + self.dropout(self.attention(self.attention_norm(x), *args, **kwargs))
        return x + self.feedforward(self.feedforward_norm(x))


@checks.arguments
class RelativePerformer(DrawsFeatures, StoresSettings):
    r"""Image classifier whose tokens are pixels: embedding, Performer blocks, mean over pixels, linear map.

    Args:
        in_channels: Channels of the image.
        num_classes: Number of outputs.
        channels: Width of the model, a multiple of ``heads``. Default 256.
        num_layers: Number of blocks. Default 6.
        heads: Number of attention heads. Default 8.
        position: Kind of positions: ``"window"`` (default), ``"clipped"`` (strategy 2 of the paper), ``"sinusoid"``
            (strategy 1) or ``None``, as in :class:`PerformerAttention`.
        pos_dim: Dimension of the image: 2 (default), or 3 for volumes.
        cutoff: Pixels at a smaller Manhattan distance are near. Default 6.
        periodic: Join opposite borders of the image. Default ``False``.
        dropout: Dropout probability of the outputs of attention and of the feed-forward part. Default 0.1.
        norm: Normalisation before the last linear map: ``"layer"`` (default), of every pixel before the mean, or
            ``"batch"``, after it.
        attn_kwargs: Further arguments of :class:`PerformerAttention`. If not given, ``method`` is
            ``"features"``. Queries and keys are as wide as values, as in the paper.

    Shapes:
        ``(B, in_channels, H, W)`` -> ``(B, num_classes)``; any H and W, not fixed at construction.

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one, or if the input has another shape.

    Source: relative-performer section 2.3 and appendix A.2. The paper's code uses a class token instead of the mean.

    Example:
        >>> import torch
        >>> model = RelativePerformer(1, 10, channels=32, num_layers=2, heads=4)
        >>> model(torch.rand(3, 1, 9, 12)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self, in_channels: checks.Count, num_classes: checks.Count, *, channels: checks.Count = 256,
        num_layers: checks.Count = 6, heads: checks.Count = 8, position: str | None = "window", pos_dim: int = 2,
        cutoff: checks.Count = CUTOFF, periodic: bool = False, dropout: checks.Probability = 0.1,
        norm: Literal["layer", "batch"] = "layer",
        attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.num_classes, self.position = in_channels, num_classes, position
        self.pos_dim, self.cutoff, self.periodic = pos_dim, cutoff, periodic
        options = {
            "position": position, "pos_dim": pos_dim, "cutoff": cutoff, "method": "features",
            "key_channels": max(1, channels // heads), **(attn_kwargs or {}),
        }  # fmt: skip
        self.embedding = nn.Linear(in_channels, channels)
        self.blocks = nn.ModuleList(
            PerformerBlock(PerformerAttention(channels, channels, heads, **options), channels, dropout)
            for _ in range(num_layers)
        )
        self.readout = MeanReadout(channels, num_classes, norm)

    def settings(self) -> dict[str, Any]:
        return {"position": self.position, "periodic": self.periodic}

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores ``(B, num_classes)`` of images ``(B, in_channels, H, W)``, or of volumes with ``pos_dim=3``."""
        if image.ndim != 2 + self.pos_dim or image.shape[1] != self.in_channels or not min(image.shape[2:]):
            axes = "H, W" if self.pos_dim == 2 else f"{self.pos_dim} axes"
            raise ValueError(f"input must be (B, {self.in_channels}, {axes}) with pixels, got {tuple(image.shape)}")
        checks.same_kind(image, self.readout.head.weight)
        grid = PixelGrid(tuple(image.shape[2:]), self.cutoff, self.periodic)
        first: Any = self.blocks[0]
        near = grid.neighbors(image.shape[0], image.device) if first.attention.needs.neighbors else None
        x = self.embedding(image.flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x, grid=grid, neighbors=near)
        return self.readout(x)
