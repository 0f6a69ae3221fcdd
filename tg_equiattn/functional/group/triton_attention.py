"""Launches of the kernels of local group self-attention (:mod:`.triton_kernels`), forward and backward."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

from . import hashed_dropout
from .triton_kernels import differentiate, weigh
from .window import window

_TILE = 2048  # scores of a tile, which two to four warps hold in registers


def _offsets(kernel_size: int, dim: int, selection: Sequence[int], device: torch.device) -> Tensor:
    """Offsets (3, D) of the neighbors, int32, counted on the device: a table would have to be copied there."""
    places, blocks = window(kernel_size, selection, dim), []
    for block in places.blocks:
        ends = zip(block.start, block.counts, strict=True)
        axes = [torch.arange(first, first + count, device=device, dtype=torch.int32) for first, count in ends]
        blocks.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) - places.radius)
    offsets = torch.cat(blocks, 1)
    return torch.cat([offsets.new_zeros(3 - dim, offsets.shape[1]), offsets])


class _Launch:
    """Operands as the kernels want them, and what both directions hand over."""

    def __init__(
        self, query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout
    ):
        count, self.channels, self.elements, *spatial = query.shape
        self.count, self.spatial, self.pixels = count, spatial, math.prod(spatial)
        self.sites, self.width, self.keys = count * self.pixels, value.shape[1], key.shape[2]
        if self.pixels * self.keys >= 2**31:
            raise ValueError(f"query must have fewer than 2^31 pixels times elements, got shape {tuple(query.shape)}")
        self.heads = rho_space.shape[-1] - self.channels
        self.full, self.paired, self.outputs = rho_space.ndim == 4, index.ndim == 2, len(index)
        self.query = query.flatten(3).permute(0, 3, 2, 1).contiguous()  # (M, pixels, T, C)
        self.key, self.value = (x.flatten(3).transpose(2, 3).contiguous() for x in (key, value))  # (M, C, pixels, S)
        self.rho_space, self.rho_group = rho_space, rho_group
        rho = rho_space.movedim(-1, 0).contiguous()  # (C + heads, H, D[, U])
        offsets = _offsets(kernel_size, len(spatial), selection, query.device)
        self.neighbors = offsets.shape[1]
        self.index = index
        flat_index = index.to(torch.int32).contiguous()
        places = self.outputs * self.keys * self.neighbors
        hashes = hashed_dropout.places(self.sites, places, seed) if dropout else (flat_index, flat_index)  # or anything
        self.operands = (
            self.query, self.key, self.value, rho, rho_group.view(-1, rho_space.shape[-1]).T.contiguous(), flat_index,
            offsets, flat_index if mask is None else mask.contiguous().view(torch.uint8), *hashes,
        )  # fmt: skip
        self.dropout = dropout
        self.padded = triton.next_power_of_2(self.neighbors), triton.next_power_of_2(self.keys)
        self.options = {
            "C": self.channels, "CV": self.width, "T": self.elements, "H": self.outputs, "D": self.neighbors,
            "S": self.keys, "HEADS": self.heads, "DP": self.padded[0], "SP": self.padded[1], "FULL": self.full,
            "PAIRED": self.paired, "CIRCULAR": circular, "MASKED": mask is not None, "DROPOUT": dropout > 0,
        }  # fmt: skip

    @property
    def sizes(self) -> tuple:
        """Pixels of an image, its three sides, and what decides dropout."""
        return self.pixels, *[1] * (3 - len(self.spatial)), *self.spatial, hashed_dropout.threshold(self.dropout)

    def blocks(self, sites: int, rows: int, scores: int) -> tuple[tuple[int, int], dict[str, int]]:
        """The grid, and how many of the ``rows`` (outputs or query elements) a program takes, with about so many
        ``scores`` a warp: more tiles in registers ask for more warps."""
        columns = self.padded[0] * self.padded[1]
        block = max(1, min(triton.next_power_of_2(rows), _TILE // columns))
        return (sites, triton.cdiv(rows, block)), {"R": block, "num_warps": max(1, min(8, block * columns // scores))}

    def runs(self, scratch: int) -> Iterator[slice]:
        """Runs of sites whose gradients of positions, about ``scratch`` numbers, are kept at a time."""
        outputs = 1 if self.paired else self.outputs
        space = self.neighbors * (self.keys if self.full else 1)
        step = max(1, scratch // (self.elements * outputs * (space + self.keys)))
        for start in range(0, self.sites, step):
            yield slice(start, min(start + step, self.sites))

    def with_head(self, run: slice) -> Tensor:
        """Queries (n, T, C + heads) of a run of sites, with a one for their head, as those of a plan."""
        query = self.query.flatten(0, 1)[run]
        if not self.heads:
            return query
        head = torch.arange(run.start, run.stop, device=query.device) // self.pixels % self.heads
        one_hot = (head[:, None] == torch.arange(self.heads, device=query.device)).to(query.dtype)
        return torch.cat([query, one_hot[:, None].expand(-1, self.elements, -1)], -1)

    def weigh(self, out: Tensor, level: Tensor, grad: Tensor, grad_value: Tensor, backward: bool) -> None:
        grid, block = self.blocks(self.sites, self.outputs, 1024)
        with torch.cuda.device_of(out):
            weigh[grid](
                *self.operands, out, level, grad, grad_value, *self.sizes, **self.options, **block, BACKWARD=backward
            )

    def differentiate(
        self, run: slice, grad: Tensor, grad_level: Tensor, grad_query: Tensor, grad_key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of a run of sites: adds to both gradients, and returns those of positions."""
        size, outputs = run.stop - run.start, 1 if self.paired else self.outputs
        last = (self.neighbors, self.keys) if self.full else (self.neighbors,)
        to_space = grad.new_empty(size, self.elements, outputs, *last)
        to_group = grad.new_empty(0 if self.full else size, self.elements, outputs, self.keys)
        grid, block = self.blocks(size, self.elements, 512)
        with torch.cuda.device_of(grad):
            differentiate[grid](
                *self.operands, grad, grad_level, grad_query, grad_key, to_space, to_group, run.start, *self.sizes,
                **self.options, **block,
            )  # fmt: skip
        return to_space, to_group

    def image(self, x: Tensor) -> Tensor:
        """(M, pixels, E, C) to (M, C, E, *spatial)."""
        return x.permute(0, 3, 2, 1).unflatten(3, self.spatial).contiguous()


def forward(*operands_and_settings) -> tuple[Tensor, Tensor]:
    """As :func:`tg_equiattn.functional.group.tiled_attention.group_attention_op`."""
    a = _Launch(*operands_and_settings)
    out = a.query.new_empty(a.count, a.pixels, a.outputs, a.width)
    level = a.query.new_empty(a.count, a.pixels, a.outputs, 1) if a.paired else a.query.new_empty(0)
    a.weigh(out, level, out, out, backward=False)
    return a.image(out if not a.dropout else out.div_(1 - a.dropout)), a.image(level)[:, 0] if a.paired else level


def backward(
    grad, grad_level, query, key, value, rho_space, rho_group, *settings, scratch=1 << 25
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, rho_space and rho_group, with about ``scratch`` numbers besides at a time."""
    _alert_not_deterministic()
    a = _Launch(query, key, value, rho_space, rho_group, *settings)
    grad = (grad / (1 - a.dropout)).flatten(3).permute(0, 3, 2, 1).contiguous()
    if a.paired:
        grad_level = grad_level.flatten(2).transpose(1, 2).contiguous()  # (M, pixels, H)
    grad_query, grad_key, grad_value = torch.zeros_like(a.query), torch.zeros_like(a.key), torch.zeros_like(a.value)
    grad_space, grad_group = rho_space.new_zeros(rho_space.shape), rho_group.new_zeros(rho_group.shape)
    a.weigh(grad, grad, grad, grad_value, backward=True)
    for run in a.runs(scratch):
        to_space, to_group = a.differentiate(run, grad, grad_level, grad_query, grad_key)
        _encodings(a, run, to_space, to_group, grad_query, grad_space, grad_group)
    restored = [x.transpose(2, 3).unflatten(3, a.spatial).contiguous() for x in (grad_key, grad_value)]
    return a.image(grad_query), restored[0], restored[1], grad_space, grad_group


def _encodings(a: _Launch, run: slice, to_space: Tensor, to_group: Tensor, grad_query: Tensor, grad_space: Tensor,
               grad_group: Tensor) -> None:  # fmt: skip
    """From the gradients of positions those of the encodings, and of the queries through them; (n, T, H, ...) each."""
    query = a.with_head(run)
    target = grad_query.flatten(0, 1)[run]
    inverse = (a.index if a.paired else a.index.transpose(0, 1)).argsort(-1)  # from s to u, (T, [H,] U)
    inverse = inverse.view(a.elements, -1, a.keys)
    if a.full:
        to_space = to_space.gather(-1, inverse[None, :, :, None].expand_as(to_space))
    else:
        by_argument = to_group.gather(-1, inverse.expand_as(to_group)).sum(2)  # (n, T, U)
        target += by_argument @ a.rho_group[:, : a.channels]
        grad_group += by_argument.flatten(0, 1).T @ query.flatten(0, 1)
    if a.paired:  # element t meets the encoding of output h = t alone
        space, rho = to_space.flatten(2).transpose(0, 1), a.rho_space.flatten(1, -2)  # (T, n, D[U]), (T, D[U], C)
        target += (space @ rho[..., : a.channels]).transpose(0, 1)
        grad_space += (space.mT @ query.transpose(0, 1)).view_as(grad_space)
    else:
        space = to_space.flatten(2)
        target += space @ a.rho_space.flatten(0, -2)[:, : a.channels]
        grad_space += (space.flatten(0, 1).T @ query.flatten(0, 1)).view_as(grad_space)


def _alert_not_deterministic() -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "the gradient of group attention on backend='triton' adds atomically and is not deterministic; use 'torch'"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)
