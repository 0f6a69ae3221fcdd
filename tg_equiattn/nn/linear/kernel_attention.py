"""What attention by random features has in common, whatever it knows of positions."""

from __future__ import annotations

import math
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.linear.clipped import Aggregate, sum_aggregation
from ...grids import PixelGrid
from ...neighbors import Neighbors
from ...ranks import Shared
from ..children import reset_children
from ..not_scriptable import NotScriptable
from .far_offsets import FarOffsets
from .nodes import Graphs, Nodes
from .positions import Position
from .random_features import RandomFeatures

METHODS = ("auto", "features", "pairs")
FEATURES = 64  # random features at least: see docs/graph_settings.md for their error
PAIRS = 2  # as many nodes for each feature a graph has at most whose pairs are less work: see the same page


class KernelAttention(Shared, NotScriptable, nn.Module):
    """Projections, random features and outputs around a kind of positions, which :meth:`_build` gets.

    Args:
        in_channels, out_channels, heads: of the layer; ``in_channels`` may be -1, to read it from the first input.
        dropout: of weights.
    """

    features: RandomFeatures | None
    far_offsets: FarOffsets | None

    def __init__(self, in_channels: int, out_channels: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        checks.positive(in_channels=1 if in_channels == -1 else in_channels, out_channels=out_channels, heads=heads)
        checks.probability(dropout=dropout)
        if out_channels % heads:
            raise ValueError(f"heads must divide out_channels={out_channels}, got {heads}")
        self.out_channels, self.heads, self.dropout = out_channels, heads, dropout
        self.head_channels = out_channels // heads

    def _build(
        self,
        in_channels: int,
        positions: Position,
        num_random_features: int | None,
        redraw_interval: int | None,
        method: str = "features",
        far_offsets: FarOffsets | None = None,
    ) -> None:
        checks.choice("method", method, METHODS)
        d, out_channels = self.head_channels, self.out_channels
        self.positions, self.method, self.far_offsets = positions, method, far_offsets
        keys = positions.key_heads * d
        self.query = _linear(in_channels, out_channels)
        self.key = _linear(in_channels, keys) if keys else None
        self.value = _linear(in_channels, out_channels)
        self.out = nn.Linear(out_channels, out_channels)
        self.features, self._most = None, math.inf
        self._learned_from: set[bool] = set()  # whether graphs in training had their pairs, or features, or both
        if method != "pairs":
            count = max(FEATURES, int(d * math.log(d))) if num_random_features is None else num_random_features
            self.features = RandomFeatures(count, d + positions.extra_channels, redraw_interval)
            self._most = PAIRS * count if method == "auto" else 0

    def why_not_shared(self) -> str | None:
        if self.needs_neighbors:
            return "near pairs, which may be of two processes"
        return "method='pairs', whose pairs may be of two processes" if self.features is None else None

    @property
    def in_channels(self) -> int:
        """Channels of the input; -1 where they are not known yet."""
        weight = self.query.weight
        return -1 if isinstance(weight, nn.UninitializedParameter) else weight.shape[1]

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, where there are any; see :class:`~tg_equiattn.nn.RandomFeatures`."""
        if self.features is not None:
            self.features.redraw_features(generator)

    def _attend(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
        pos: Tensor | None = None,
        grid: PixelGrid | None = None,
        neighbors: Neighbors | None = None,
        aggregate: Aggregate = sum_aggregation,
        return_attention_weights: bool = False,
        return_vectors: bool = False,
    ) -> Any:
        """Outputs; and, where they are asked for, weights and vectors after them."""
        known = self.in_channels != -1
        if x.ndim not in (2, 3) or (known and x.shape[-1] != self.in_channels):
            raise ValueError(
                f"input must be (B, N, {self.in_channels}), or (N, {self.in_channels}) with batch, got {tuple(x.shape)}"
            )
        if return_vectors and self.far_offsets is None:
            raise ValueError("return_vectors must be with values='offset', whose means vectors are")
        checks.same_kind(x, self.query.weight)
        nodes = Nodes(
            x, self.positions, needs_positions=self.far_offsets is not None, mask=mask, batch=batch,
            batch_size=batch_size, pos=pos, grid=grid, neighbors=neighbors, aggregate=aggregate, most=self._most,
            max_num_nodes=max_num_nodes, ranks=self.ranks,
        )  # fmt: skip
        if self.method == "auto" and not torch.compiler.is_compiling():
            self._watch({graphs.pairs for graphs in nodes.graphs})
        projection = None if self.features is None else self.features()
        if not x.numel() and self.ranks is None:  # this counted a training step, as on ranks that have nodes
            out = self.out(self.value(x))
            vectors = out.new_zeros(*x.shape[:-1], self.heads, self.positions.pos_dim)
            weights = out.new_zeros(0, self.heads) if return_attention_weights else None
            return _returned(out, weights, vectors, return_vectors)
        x = self.positions.encode(nodes.x, nodes.pos)
        query, value = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.query, self.value))
        key = query[:, :0] if self.key is None else self.key(x).unflatten(-1, (-1, self.head_channels))
        means = [
            self._means(graphs.take(query), graphs.take(key), graphs.take(value), projection, graphs)
            for graphs in nodes.graphs
        ]
        out = self.out(nodes.joined([content for content, _ in means]).flatten(1))
        vectors = None
        if self.far_offsets is not None:
            vectors = nodes.joined([vectors for _, vectors in means])
            out = out + self.far_offsets(self.positions.in_units(vectors)).to(out.dtype)
            vectors = nodes.restore(vectors.to(self.out.weight.dtype)) if return_vectors else None
        weights = None
        if return_attention_weights:
            weights = nodes.joined_weights([
                self.positions.weights(graphs.take(query), graphs.take(key), projection, graphs)
                for graphs in nodes.graphs
            ])  # fmt: skip
        return _returned(nodes.restore(out), weights, vectors, return_vectors)

    def _watch(self, now: set[bool]) -> None:
        """Warn once where graphs are attended to in a way that training has not seen."""
        if self.training:
            self._learned_from |= now
        elif self._learned_from and not now <= self._learned_from:
            self._learned_from |= now
            warnings.warn(
                f"method='auto' takes {'pairs' if True in now else 'random features'} for graphs of this size, and "
                "took the other for all graphs of training, which is another function: train and test with "
                "method='features', or 'pairs'",
                stacklevel=4,
            )

    def _means(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs
    ) -> tuple[Tensor, Tensor]:
        """The weighted means of values (N, heads, e), and of offsets of all nodes (N, heads, dim), if wanted."""
        dropout = self.dropout if self.training else 0.0
        if self.far_offsets is None:
            return self.positions(query, key, value, projection, graphs, dropout), value
        dtype = torch.promote_types(value.dtype, torch.float32)
        places = graphs.rows.centred(cast(Tensor, graphs.pos)).to(dtype)[:, None].expand(-1, self.heads, -1)
        parts = [value.to(dtype), places]
        parts += [torch.ones_like(places[..., :1])] if dropout else []  # what is left of the sum of weights
        means = self.positions(query, key, torch.cat(parts, -1), projection, graphs, dropout)
        sizes = [part.shape[-1] for part in parts]
        content, there, *total = means.split(sizes, -1)
        return content.to(value.dtype), there - (places * total[0] if total else places)

    @property
    def needs_neighbors(self) -> bool:
        """Whether positions need near pairs with offsets."""
        return self.positions.needs_neighbors

    @property
    def whole_offsets(self) -> bool:
        """Whether offsets index a table, or are counted as distances, and have to be whole numbers up to rounding."""
        return self.positions.whole_offsets


def _returned(out: Tensor, weights: Tensor | None, vectors: Tensor | None, return_vectors: bool) -> Any:
    returned = [out, *([] if weights is None else [weights]), *([vectors] if return_vectors else [])]
    return out if len(returned) == 1 else tuple(returned)


def _linear(in_channels: int, out_channels: int) -> nn.Linear:
    return nn.LazyLinear(out_channels, False) if in_channels == -1 else nn.Linear(in_channels, out_channels, False)
