"""Group self-attention tile by tile: operands in lanes, masks, encodings, dropout draws; and the formula as written."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...modes import full_precision, transformed
from ..backend import tile_numbers
from . import direct, hashed_dropout
from .tiles import from_lanes, tiling, to_lanes

# Floats of the largest temporary of one tile. Compiled steps fuse their loops and gain from tiles that stay in a
# core's second-level cache; eager steps call many small operators and gain from longer ones. Pointwise, an eager
# temporary is one query element's, and gathering windows weighs more beside less arithmetic.
_TILE_BUDGET = {
    "compiled": 1 << 18, "eager": 1 << 20, "compiled pointwise": 1 << 19, "eager pointwise": 1 << 17, "plain": 1 << 18,
}  # fmt: skip

# The score of a key that a mask leaves out. Finite, so that the weights of a query that is left out itself, and whose
# window may hold no key at all, are numbers too.
HIDDEN = -1e30


class AttentionPlan:
    """Everything both directions share: operands in lanes, tiles, masks, dropout draws. It iterates over tiles, of
    images and heads that lie beside each other (a lane) and of pixels."""

    def __init__(
        self, query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout,
        path,
    ):  # fmt: skip
        spatial, elements, keys = query.shape[3:], query.shape[2], key.shape[2]
        self.paired, self.full, self.dropout = index.ndim == 2, rho_space.ndim == 4, dropout
        here = query.device.type == "cpu"
        self.direct = path in ("plain", "whole") or (not self.paired and (self.full or not here))  # a tile's scores
        self.fused = path == "compiled" and not (self.direct and here)
        self.table = index[None] if self.paired else index  # (H, T, S), or (1, T, S)
        self.inverse = self.table.argsort(-1)
        neighbors = math.prod(spatial) if kernel_size == 0 else rho_space.shape[1]
        temporary = neighbors * keys
        if not self.paired:
            temporary *= len(index) * (elements if self.direct else 1)
        elif self.direct or self.fused:
            temporary *= elements
        if not here:  # where windows are gathered, not looked through
            temporary = max(temporary, neighbors * keys * max(query.shape[1], value.shape[1]))
        kind = f"{path} pointwise" if self.paired and not self.direct else path
        self.budget = tile_numbers(query.device, _TILE_BUDGET.get(kind, 0), 8 if self.paired else 4)
        width = None if path == "whole" else max(16 if self.direct else 64, self.budget // temporary)
        self.tiling = tiling(spatial, kernel_size, selection, circular, query.shape[0], width, query)
        lanes = self.tiling.lanes
        self.query = to_lanes(query, lanes)
        self.channels, heads = query.shape[1], rho_space.shape[-1] - query.shape[1]
        head = torch.arange(query.shape[0], device=query.device) % max(1, heads)
        one_hot = head == torch.arange(heads, device=query.device)[:, None]  # where a query is of this head
        self.one_hot = one_hot.to(query.dtype).view(heads, -1, lanes) if heads else None
        self.key = [self.tiling.prepare(x) for x in to_lanes(key, lanes)]
        self.value = [self.tiling.prepare(x) for x in to_lanes(value, lanes)]
        self.hidden: list[Tensor] | None = None
        if mask is not None:
            hidden = query.new_zeros(mask.shape).masked_fill(~mask, HIDDEN)
            self.hidden = [self.tiling.prepare(x, -math.inf) for x in to_lanes(hidden[:, None, None], lanes)]
        self.rho_space = rho_space.transpose(0, 1).contiguous()  # (D, H, [U,] C + heads)
        self.rho_group = rho_group
        self.hashes: tuple[Tensor, Tensor] | None = None
        if dropout:
            row, column = hashed_dropout.places(
                query.shape[0] * math.prod(spatial), len(index) * keys * neighbors, seed
            )
            column = column.view(-1, keys, neighbors).permute(2, 0, 1)[..., None]  # (D, H, S, 1)
            self.hashes = to_lanes(row.view(-1, 1, 1, *spatial), lanes), column

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        return ((lane, tile) for lane in range(self.query.shape[0]) for tile in self.tiling)

    def with_head(self, query: Tensor, lane: int) -> Tensor:
        """(T, C, p) -> (T, C + heads, p): queries and, where encodings have biases behind their channels, a one for
        the head that a query is of and zeros for the others."""
        if self.one_hot is None:
            return query
        head = self.one_hot[:, lane, None].expand(-1, query.shape[-1] // self.tiling.lanes, -1).flatten(1)
        return torch.cat([query, head.expand(len(query), -1, -1)], 1)

    def rho(self, rho_space: Tensor) -> Tensor:
        """A view of ``rho_space``, the encodings or their gradients: (D, E, C + heads) with E the output elements, or
        with the full encoding output elements times U; (T, D, 1 or U, C + heads) with the pointwise relation."""
        if self.paired:
            return rho_space.transpose(0, 1).unflatten(1, (-1, 1)).flatten(2, -2)
        return rho_space.flatten(1, -2)

    def bias(self, lane: int, tile: slice) -> Tensor | None:
        """(D, p): 0 for keys that are there; None where all are."""
        if self.hidden is None:
            return self.tiling.mask(tile)
        return self.tiling.gather(self.tiling.slab(self.hidden[lane], tile), tile)[:, 0, 0]

    def keep(self, lane: int, tile: slice, dtype: torch.dtype) -> Tensor | None:
        """Dropout factors (D, H, S, p)."""
        if self.hashes is None:
            return None
        row = self.tiling.query(self.hashes[0][lane], tile)[0, 0]
        return hashed_dropout.keep(row, self.hashes[1], self.dropout, dtype)

    def slabs(self, lane: int, tile: slice) -> tuple[Tensor, Tensor, Tensor]:
        """A tile's queries, and what its windows cover of keys and values."""
        key, value = (self.tiling.slab(x[lane], tile) for x in (self.key, self.value))
        return self.tiling.query(self.query[lane], tile), key, value

    def operands(self, lane: int, tile: slice, query, key, value, rho_space, rho_group) -> dict[str, Tensor | None]:
        """What the forms of the formula take, of a tile's :meth:`slabs` and of encodings."""
        headed = self.with_head(query, lane)
        return {
            "query": query, "key": self.tiling.gather(key, tile), "value": self.tiling.gather(value, tile),
            "position": self.tiling.position(self.rho(rho_space), headed, tile),
            "group": None if self.full else torch.matmul(rho_group, headed), "bias": self.bias(lane, tile),
            "keep": self.keep(lane, tile, key.dtype),
        }  # fmt: skip

    def attend(self, lane: int, tile: slice, *slabs_and_encodings: Tensor) -> tuple[Tensor, Tensor]:
        """The formula as written, which can be differentiated in slabs and encodings: the output (H, C, p), and with
        the pointwise relation the level (T, p), else nothing."""
        operands = self.operands(lane, tile, *slabs_and_encodings)
        return direct.forward(**operands, index=self.table, paired=self.paired)  # type: ignore[arg-type]


def plain_group_attention(
    query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout, path="plain"
) -> tuple[Tensor, Tensor]:
    """As :func:`.tiled_attention.group_attention_op`, in torch's own operations, which every transform understands,
    with one tile, for images of all sizes, where it is compiled, exported or traced."""
    whole = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not whole and not query.shape[0]:
        shape = 0, value.shape[1], index.shape[0], *query.shape[3:]
        out = query.new_zeros(shape) + 0 * sum(x.sum() for x in (query, key, value, rho_space, rho_group))
        return out, out[:, 0] if index.ndim == 2 else out.flatten()
    with full_precision(query.device):
        plan = AttentionPlan(
            query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout,
            "whole" if whole else "plain",
        )  # fmt: skip
        again = torch.is_grad_enabled() and not whole and not transformed()
        outs: list[list[Tensor]] = [[] for _ in range(plan.query.shape[0])]
        levels: list[list[Tensor]] = [[] for _ in outs]
        for lane, tile in plan:
            run = functools.partial(plan.attend, lane, tile)
            operands = *plan.slabs(lane, tile), plan.rho_space, rho_group
            out, level = checkpoint(run, *operands, use_reentrant=False) if again else run(*operands)
            outs[lane].append(out)
            levels[lane].append(level[:, None] if plan.paired else level)
        join = plan.tiling.join
        level = from_lanes(torch.stack([join(x) for x in levels])).squeeze(1) if plan.paired else query.new_zeros(0)
        return from_lanes(torch.stack([join(x) for x in outs])), level
