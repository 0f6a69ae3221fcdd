"""Tiles of queries with their keys, for local windows and global attention: images and heads (``M``) are split into
groups of ``m`` lanes; a tile is a run of pixels times ``m``, flattened to the innermost axis ``p``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...modes import transformed
from .window import places_of_pairs, window


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that does not exceed limit (at least 1)."""
    return max(d for d in range(1, min(n, max(limit, 1)) + 1) if n % d == 0)


def _runs(count: int, step: int | None) -> Iterator[slice]:
    """Runs of ``step`` of ``count`` numbers, or one of all, whatever their number."""
    if step is None:
        yield slice(0, count)
        return
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def to_lanes(x: Tensor, lanes: int) -> Tensor:
    """(M, C, T, *spatial) -> contiguous (M / m, T, C, *spatial, m)."""
    return x.unflatten(0, (-1, lanes)).movedim(1, -1).transpose(1, 2).contiguous()


def from_lanes(x: Tensor) -> Tensor:
    """The inverse of to_lanes."""
    return x.transpose(1, 2).movedim(-1, 1).flatten(0, 1).contiguous()


class LocalTiling:
    """Windows of ``kernel_size`` pixels; a tile is a slab of the first spatial axis."""

    def __init__(
        self, spatial: Sequence[int], kernel_size: int, selection: Sequence[int], lanes: int, width: int | None,
        reference: Tensor, circular: bool = False,
    ) -> None:  # fmt: skip
        self.spatial, self.kernel_size, self.lanes, self.circular = tuple(spatial), kernel_size, lanes, circular
        self.window = window(kernel_size, selection, len(self.spatial), tail=1)
        self.rows = None if width is None else max(1, width // (lanes * math.prod(self.spatial[1:])))
        self.bias: Tensor | None = None
        if not circular:
            inside = self.window.pad(reference.new_zeros(*self.spatial, 1), outside=-math.inf)
            self.bias = torch.stack(self.window.views(inside))

    def __iter__(self) -> Iterator[slice]:
        yield from _runs(self.spatial[0], self.rows)

    def prepare(self, x: Tensor, outside: float = 0.0) -> Tensor:
        """Keys or values in lanes, (S, C, *spatial, m), padded so that every window lies inside."""
        return self.window.pad(x, self.circular, outside)

    def restore(self, padded: Tensor) -> Tensor:
        """The gradient (..., S, C, *spatial, m) of an image from that of :meth:`prepare`'s."""
        return self.window.unpad(padded, self.circular)

    def slab(self, padded: Tensor, tile: slice) -> Tensor:
        """What the windows of a tile cover of (S, C, *padded, m), as a view."""
        return padded[:, :, tile.start : tile.stop + 2 * self.window.radius]

    def gather(self, slab: Tensor, tile: slice) -> Tensor:
        """A tile's slab -> (D, S, C, p), the keys of each of its queries."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if traced or torch.is_grad_enabled() or transformed():  # unfold's backward is slow, and vmap has no rule for it
            return torch.stack(self.window.views(slab)).flatten(3)
        n = len(self.spatial)
        parts = [self.window.within(slab, block) for block in self.window.blocks]
        places = [part.movedim(tuple(range(2, 2 + n)), tuple(range(n))).flatten(0, n - 1) for part in parts]
        return (places[0] if len(places) == 1 else torch.cat(places)).flatten(3)

    def scatter_(self, padded: Tensor, tile: slice, update: Tensor) -> None:
        """Add the gradient (D, S, C, p) of a gather to the padded image."""
        update = update.unflatten(-1, (tile.stop - tile.start, *self.spatial[1:], self.lanes))
        for view, part in zip(self.window.views(self.slab(padded, tile)), update, strict=True):
            view.add_(part)

    def mask(self, tile: slice) -> Tensor | None:
        """(D, p): 0 for neighbors inside the image, -inf outside; None where none is outside."""
        if self.bias is None:
            return None
        return self.bias[:, tile].expand(*[-1] * (1 + len(self.spatial)), self.lanes).flatten(1)

    def query(self, x: Tensor, tile: slice) -> Tensor:
        """(T, C, *spatial, m) -> (T, C, p)."""
        return x[:, :, tile].flatten(2)

    def join(self, tiles: Sequence[Tensor]) -> Tensor:
        """(T, C, p) of all tiles in turn -> (T, C, *spatial, m)."""
        rows = [x.unflatten(-1, (-1, *self.spatial[1:], self.lanes)) for x in tiles]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 2)

    def write_(self, x: Tensor, tile: slice, update: Tensor) -> None:
        """Store (T, C, p) in (T, C, *spatial, m)."""
        target = x[:, :, tile]
        target.copy_(update.view(target.shape))

    def position(self, rho: Tensor, query: Tensor, tile: slice) -> Tensor:
        """Logits (T, D, E, p) of encodings rho (D, E, C), or (T, D, E, C) where each element has its own."""
        return torch.matmul(rho.flatten(-3, -2), query).unflatten(1, rho.shape[-3:-1])

    def position_backward(self, rho: Tensor, query: Tensor, tile: slice, grad: Tensor, grad_rho: Tensor) -> Tensor:
        """Gradient of the query; that of rho is added to ``grad_rho``."""
        grad = grad.flatten(1, 2)
        update = torch.matmul(grad, query.mT)
        grad_rho += (update if rho.ndim == 4 else update.sum(0)).view(rho.shape)
        return torch.matmul(rho.flatten(-3, -2).mT, grad)


class GlobalTiling:
    """All pixels are keys of all pixels; a tile is a run of flattened pixels."""

    def __init__(self, spatial: Sequence[int], lanes: int, width: int | None) -> None:
        self.spatial, self.lanes = tuple(spatial), lanes
        self.run = None if width is None else max(1, width // lanes)

    def __iter__(self) -> Iterator[slice]:
        yield from _runs(math.prod(self.spatial), self.run)

    def prepare(self, x: Tensor, outside: float = 0.0) -> Tensor:
        """(S, C, *spatial, m) -> (N, S, C, m); nothing is outside."""
        return x.flatten(2, -2).movedim(2, 0).contiguous()

    def restore(self, x: Tensor) -> Tensor:
        """(..., N, S, C, m) -> (..., S, C, *spatial, m)."""
        return x.movedim(-4, -2).unflatten(-2, self.spatial)

    def slab(self, x: Tensor, tile: slice) -> Tensor:
        return x

    def gather(self, x: Tensor, tile: slice) -> Tensor:
        """(N, S, C, m) -> (D, S, C, p)."""
        return x[:, :, :, None].expand(-1, -1, -1, tile.stop - tile.start, -1).flatten(3)

    def scatter_(self, x: Tensor, tile: slice, update: Tensor) -> None:
        x += update.unflatten(-1, (-1, self.lanes)).sum(3)

    def mask(self, tile: slice) -> Tensor | None:
        return None

    def query(self, x: Tensor, tile: slice) -> Tensor:
        return x.flatten(2, -2)[:, :, tile].flatten(2)

    def join(self, tiles: Sequence[Tensor]) -> Tensor:
        runs = [x.unflatten(-1, (-1, self.lanes)) for x in tiles]
        return torch.cat(runs, 2).unflatten(2, self.spatial)

    def write_(self, x: Tensor, tile: slice, update: Tensor) -> None:
        x.flatten(2, -2)[:, :, tile] = update.unflatten(-1, (-1, self.lanes))

    def position(self, rho: Tensor, query: Tensor, tile: slice) -> Tensor:
        query, encodings = query.unflatten(-1, (-1, self.lanes)), "tndec"[-rho.ndim - 1 :]
        relative = places_of_pairs(self.spatial, query.device, tile)
        return torch.einsum(f"{encodings},tcnm->tdenm", rho[..., relative, :, :], query).flatten(3)

    def position_backward(self, rho: Tensor, query: Tensor, tile: slice, grad: Tensor, grad_rho: Tensor) -> Tensor:
        relative, lanes = places_of_pairs(self.spatial, query.device, tile), (-1, self.lanes)
        query, grad = query.unflatten(-1, lanes).transpose(1, 2), grad.unflatten(-1, lanes).permute(0, 3, 1, 2, 4)
        grad = grad.flatten(2, 3)  # (T, n, N E, m)
        if rho.ndim == 3:  # all query elements share the encodings: (n, C or N E, T m)
            query, grad = (x.permute(1, 2, 0, 3).flatten(2) for x in (query, grad))
        update = torch.matmul(query, grad.mT).mT.unflatten(-2, (relative.shape[1], -1))
        grad_rho.index_add_(-3, relative.flatten(), update.flatten(-4, -3))
        back = torch.matmul(rho[..., relative, :, :].flatten(-3, -2).mT, grad)
        back = back.transpose(1, 2) if rho.ndim == 4 else back.unflatten(-1, lanes).permute(2, 1, 0, 3)
        return back.flatten(2)


def tiling(
    spatial: Sequence[int], kernel_size: int, selection: Sequence[int], circular: bool, images: int, width: int | None,
    reference: Tensor,
) -> LocalTiling | GlobalTiling:  # fmt: skip
    """The tiling of ``images`` grids into tiles of about ``width`` queries, or into one tile; ``kernel_size`` 0 means
    global."""
    lanes = images
    if width is not None:
        lanes = largest_divisor(images, width if kernel_size == 0 else width // math.prod(spatial[1:]))
    if kernel_size == 0:
        return GlobalTiling(spatial, lanes, width)
    return LocalTiling(spatial, kernel_size, selection, lanes, width, reference, circular)
