"""How group self-attention works through its operands: blocks of output elements, lanes, tiles, dropout draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import factorised, hashed_dropout
from .tiles import tiling, to_lanes

# Floats of the largest temporary of one tile. Compiled steps fuse their loops and gain from tiles that stay in a
# core's second-level cache; eager steps call many small operators and gain from longer ones. Pointwise, an eager
# temporary is one query element's, and gathering windows weighs more beside less arithmetic.
# A GPU needs millions of elements a launch.
_TILE_BUDGET = {
    "compiled": 1 << 18, "eager": 1 << 20, "compiled pointwise": 1 << 19, "eager pointwise": 1 << 17, "plain": 1 << 18,
    "other": 1 << 24,
}  # fmt: skip


# The score of a key that a mask leaves out. Finite, so that the weights of a query that is left out itself, and whose
# window may hold no key at all, are numbers too.
HIDDEN = -1e30


class OutputBlock(NamedTuple):
    """The query elements, output elements and (H, T, S) index of one call of the core, with the inverse of the index
    along S; (T, S) where the core is :mod:`.pointwise`."""

    query: slice
    output: slice
    table: Tensor
    inverse: Tensor


def _output_blocks(index: Tensor, pointwise: bool) -> list[OutputBlock]:
    inverse = index.argsort(-1)
    if index.ndim == 3 or pointwise:
        return [OutputBlock(slice(None), slice(None), index, inverse)]
    return [
        OutputBlock(slice(t, t + 1), slice(t, t + 1), index[t][None, None], inverse[t][None, None])
        for t in range(len(index))
    ]


class AttentionPlan:
    """Everything both directions share: operands in lanes, tiles, masks, blocks of output elements, dropout draws."""

    def __init__(
        self, query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout,
        path,
    ):  # fmt: skip
        spatial = query.shape[3:]
        self.paired = index.ndim == 2  # the pointwise relation h = t
        self.pointwise = self.paired and path in ("eager", "compiled")
        self.blocks = _output_blocks(index, self.pointwise)
        self.full = rho_space.ndim == 4
        self.fused, self.dropout = path == "compiled" and (self.pointwise or not self.full), dropout
        outputs = index.shape[0] if index.ndim == 3 or (self.pointwise and self.fused) else 1
        neighbors = math.prod(spatial) if kernel_size == 0 else rho_space.shape[1]
        direct = self.full or path == "plain"  # every score of all query elements of a block is formed
        temporary = outputs * index.shape[-1] * neighbors * (query.shape[2] if direct and index.ndim == 3 else 1)
        kind = f"{path} pointwise" if self.pointwise else path if path in _TILE_BUDGET else "eager"
        self.budget = _TILE_BUDGET["other" if query.device.type != "cpu" else kind]
        width = None if path == "whole" else max(16 if direct else 64, self.budget // temporary)
        self.tiling = tiling(spatial, kernel_size, selection, circular, query.shape[0], width, query)
        lanes = self.tiling.lanes
        self.query = to_lanes(query, lanes)
        self.channels, heads = query.shape[1], rho_space.shape[-1] - query.shape[1]
        self.one_hot = self._one_hot(query, heads).view(heads, -1, lanes) if heads else None
        self.key = [self.tiling.prepare(x) for x in to_lanes(key, lanes)]
        self.value = [self.tiling.prepare(x) for x in to_lanes(value, lanes)]
        self.hidden: list[Tensor] | None = None
        if mask is not None:
            hidden = query.new_zeros(mask.shape).masked_fill(~mask, HIDDEN)
            hidden = to_lanes(hidden[:, None, None], lanes)
            self.hidden = [self.tiling.prepare(x, -math.inf) for x in hidden]
        self.rho_space = rho_space.transpose(0, 1).contiguous()  # (D, H, [U,] C + heads)
        self.rho_group = rho_group
        self.hashes: tuple[Tensor, Tensor] | None = None
        if dropout:
            columns = len(index) * index.shape[-1] * neighbors
            row, column = hashed_dropout.places(query.shape[0] * math.prod(spatial), columns, seed)
            column = column.view(-1, index.shape[-1], neighbors).permute(2, 0, 1)[..., None]  # (D, H, S, 1)
            self.hashes = to_lanes(row.view(-1, 1, 1, *spatial), lanes), column

    @staticmethod
    def _one_hot(query: Tensor, heads: int) -> Tensor:
        """(heads, M): one where a query is of this head."""
        head = torch.arange(query.shape[0], device=query.device) % heads
        return (head == torch.arange(heads, device=query.device)[:, None]).to(query.dtype)

    def with_head(self, query: Tensor, lane: int) -> Tensor:
        """(T, C, p) -> (T, C + heads, p): queries and, where encodings have biases behind their channels, a one for
        the head that a query is of and zeros for the others."""
        if self.one_hot is None:
            return query
        head = self.one_hot[:, lane, None].expand(-1, query.shape[-1] // self.tiling.lanes, -1).flatten(1)
        return torch.cat([query, head.expand(len(query), -1, -1)], 1)

    def rho(self, block: OutputBlock, rho_space: Tensor) -> Tensor:
        """A view of ``rho_space``, the encodings or their gradients: (D, E, C + heads) with E the output elements, or
        with the full encoding output elements times U; (T, D, 1 or U, C + heads) in :mod:`.pointwise`."""
        rho = rho_space[:, block.output]
        if self.pointwise:
            return rho.transpose(0, 1).unflatten(1, (-1, 1)).flatten(2, -2)
        return rho.flatten(1, -2)

    def tiles(self) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor | None]]:
        for lane in range(len(self.query)):
            for tile in self.tiling:
                key, value = (self.tiling.gather(self.tiling.slab(x[lane], tile), tile) for x in (self.key, self.value))
                yield lane, tile, key, value, self.bias(lane, tile)

    def bias(self, lane: int, tile: slice) -> Tensor | None:
        """(D, p): 0 for keys that are there; None where all are."""
        if self.hidden is None:
            return self.tiling.mask(tile)
        return self.tiling.gather(self.tiling.slab(self.hidden[lane], tile), tile)[:, 0, 0]

    def keep(self, lane: int, tile: slice, block: OutputBlock, dtype: torch.dtype) -> Tensor | None:
        """Dropout factors (D, H, S, p)."""
        if self.hashes is None:
            return None
        row = self.tiling.query(self.hashes[0][lane], tile)[0, 0]
        return hashed_dropout.keep(row, self.hashes[1][:, block.output], self.dropout, dtype)

    def group_logits(self, query: Tensor) -> Tensor:
        """(T, U, p) of :meth:`with_head`'s queries."""
        return torch.matmul(self.rho_group, query)

    def safe(self, smallest: Tensor) -> bool:
        """Whether the factors kept their precision; only the CPU is asked (elsewhere factors are double)."""
        return smallest.device.type != "cpu" or bool(smallest >= factorised.SMALLEST_NORMALISER[smallest.dtype])

    def pieces(self, block: OutputBlock, key: Tensor) -> list[slice]:
        """Runs of queries of a tile for which the direct formula may hold every score at once."""
        scores = block.table.numel() * key.shape[0]
        width = max(1, 4 * self.budget // scores)
        return [slice(p, p + width) for p in range(0, key.shape[-1], width)]
