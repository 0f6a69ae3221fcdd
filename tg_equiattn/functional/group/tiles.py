"""Tiles of queries with their keys, for local windows and for global attention, on any grid.

Images and heads (``M`` of them) are split into groups of ``m`` lanes; a tile is a run of pixels times ``m``,
flattened to the innermost axis ``p``. Local tiles copy each window out of a padded image; global tiles see all
pixels. Both offer the same methods, so that the kernel does not know which it runs on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that does not exceed limit (at least 1)."""
    return max(d for d in range(1, min(n, max(limit, 1)) + 1) if n % d == 0)


def to_lanes(x: Tensor, lanes: int) -> Tensor:
    """(M, C, T, *spatial) -> contiguous (M / m, T, C, *spatial, m)."""
    x = x.unflatten(0, (-1, lanes)).movedim(1, -1)
    return x.transpose(1, 2).contiguous()


def from_lanes(x: Tensor) -> Tensor:
    """The inverse of to_lanes."""
    return x.transpose(1, 2).movedim(-1, 1).flatten(0, 1).contiguous()


class LocalTiling:
    """Windows of ``kernel_size`` pixels; a tile is a slab of the first spatial axis."""

    def __init__(
        self,
        spatial: Sequence[int],
        kernel_size: int,
        selection: Sequence[int],
        lanes: int,
        width: int,
        reference: Tensor,
    ) -> None:
        self.spatial, self.kernel_size, self.selection, self.lanes = tuple(spatial), kernel_size, selection, lanes
        self.radius = kernel_size // 2
        self.rows = max(1, width // (lanes * math.prod(self.spatial[1:])))
        inside = F.pad(reference.new_zeros(self.spatial), self._padding, value=float("-inf"))
        self.bias = self._windows(inside[None, None, ..., None], slice(0, self.spatial[0]))[:, 0, 0]

    @property
    def _padding(self) -> list[int]:
        return [self.radius] * (2 * len(self.spatial))

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.spatial[0], self.rows):
            yield slice(start, min(start + self.rows, self.spatial[0]))

    def prepare(self, x: Tensor) -> Tensor:
        """Keys or values in lanes, (S, C, *spatial, m), padded so that every window lies inside."""
        return F.pad(x, [0, 0, *self._padding])

    def restore(self, padded: Tensor) -> Tensor:
        """The image inside a padded (..., S, C, *padded, m)."""
        for axis, n in enumerate(self.spatial):
            padded = padded.narrow(axis - len(self.spatial) - 1, self.radius, n)
        return padded

    def _windows(self, padded: Tensor, tile: slice) -> Tensor:
        """(S, C, *padded, m) -> (K^d, S, C, p), all windows centred in the tile."""
        dim = len(self.spatial)
        x = padded[:, :, tile.start : tile.stop + 2 * self.radius]
        for axis in range(2, 2 + dim):
            x = x.unfold(axis, self.kernel_size, 1)
        x = x.permute(*range(3 + dim, 3 + 2 * dim), *range(3 + dim))
        return x.reshape(self.kernel_size**dim, *padded.shape[:2], -1)

    def _select(self, x: Tensor) -> Tensor:
        """The chosen offsets of a square window, without an index tensor that would have to reach the device."""
        return torch.stack([x[i] for i in self.selection]) if self.selection else x

    def gather(self, padded: Tensor, tile: slice) -> Tensor:
        """(S, C, *padded, m) -> (D, S, C, p), the keys of each query of the tile."""
        windows = self._windows(padded, tile)
        return self._select(windows)

    def scatter_(self, padded: Tensor, tile: slice, update: Tensor) -> None:
        """Add the gradient (D, S, C, p) of a gather to the padded image."""
        dim, size = len(self.spatial), self.kernel_size
        shape = (tile.stop - tile.start, *self.spatial[1:])
        update = update.unflatten(-1, (*shape, self.lanes))
        chosen = self.selection or range(size**dim)
        for piece, flat in zip(update, chosen, strict=True):
            target = padded
            for axis in reversed(range(dim)):
                start = flat % size + (tile.start if axis == 0 else 0)
                target = target.narrow(2 + axis, start, shape[axis])
                flat //= size
            target += piece

    def mask(self, tile: slice) -> Tensor | None:
        """(D, p): 0 for neighbours inside the image, -inf outside."""
        bias = self.bias.unflatten(-1, self.spatial)[:, tile]
        bias = self._select(bias)
        return bias.flatten(1)[..., None].expand(-1, -1, self.lanes).flatten(1)

    def query(self, x: Tensor, tile: slice) -> Tensor:
        """(T, C, *spatial, m) -> (T, C, p)."""
        return x[:, :, tile].flatten(2)

    def write_(self, x: Tensor, tile: slice, update: Tensor) -> None:
        """Store (T, C, p) in (T, C, *spatial, m)."""
        target = x[:, :, tile]
        target.copy_(update.view(target.shape))

    def position(self, rho: Tensor, query: Tensor, tile: slice) -> Tensor:
        """Logits (T, D, E, p) of encodings rho (D, E, C)."""
        return torch.matmul(rho.flatten(0, 1), query).unflatten(1, rho.shape[:2])

    def position_backward(self, rho: Tensor, query: Tensor, tile: slice, grad: Tensor, grad_rho: Tensor) -> Tensor:
        """Gradient of the query; that of rho is added to ``grad_rho``."""
        grad = grad.flatten(1, 2)
        grad_rho += torch.matmul(grad, query.mT).sum(0).view(rho.shape)
        return torch.matmul(rho.flatten(0, 1).T, grad)


class GlobalTiling:
    """All pixels are keys of all pixels; a tile is a run of flattened pixels."""

    def __init__(self, spatial: Sequence[int], lanes: int, width: int, reference: Tensor) -> None:
        self.spatial, self.lanes = tuple(spatial), lanes
        self.pixels = math.prod(self.spatial)
        self.run = max(1, width // lanes)
        axes = torch.meshgrid(*(torch.arange(n, device=reference.device) for n in self.spatial), indexing="ij")
        self.coordinates = torch.stack(axes, -1).flatten(0, -2)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.pixels, self.run):
            yield slice(start, min(start + self.run, self.pixels))

    def prepare(self, x: Tensor) -> Tensor:
        """(S, C, *spatial, m) -> (N, S, C, m)."""
        return x.flatten(2, -2).movedim(2, 0).contiguous()

    def restore(self, x: Tensor) -> Tensor:
        """(..., N, S, C, m) -> (..., S, C, *spatial, m)."""
        return x.movedim(-4, -2).unflatten(-2, self.spatial)

    def gather(self, x: Tensor, tile: slice) -> Tensor:
        """(N, S, C, m) -> (D, S, C, p)."""
        return x[:, :, :, None].expand(-1, -1, -1, tile.stop - tile.start, -1).flatten(3)

    def scatter_(self, x: Tensor, tile: slice, update: Tensor) -> None:
        x += update.unflatten(-1, (-1, self.lanes)).sum(3)

    def mask(self, tile: slice) -> Tensor | None:
        return None

    def query(self, x: Tensor, tile: slice) -> Tensor:
        return x.flatten(2, -2)[:, :, tile].flatten(2)

    def write_(self, x: Tensor, tile: slice, update: Tensor) -> None:
        x.flatten(2, -2)[:, :, tile] = update.unflatten(-1, (-1, self.lanes))

    def _relative(self, tile: slice) -> Tensor:
        """Flat index of the offset of each (query of the tile, key) in the grid of all offsets, (n, N)."""
        offset = self.coordinates[None] - self.coordinates[tile, None]
        flat = torch.zeros_like(offset[..., 0])
        for axis, n in enumerate(self.spatial):
            flat = flat * (2 * n - 1) + offset[..., axis] + n - 1
        return flat

    def position(self, rho: Tensor, query: Tensor, tile: slice) -> Tensor:
        query = query.unflatten(-1, (-1, self.lanes))
        logits = torch.einsum("ndec,tcnm->tdenm", rho[self._relative(tile)], query)
        return logits.flatten(3)

    def position_backward(self, rho: Tensor, query: Tensor, tile: slice, grad: Tensor, grad_rho: Tensor) -> Tensor:
        relative = self._relative(tile)
        query = query.unflatten(-1, (-1, self.lanes))
        grad = grad.unflatten(-1, (-1, self.lanes))
        update = torch.einsum("tdenm,tcnm->ndec", grad, query)
        grad_rho.index_add_(0, relative.flatten(), update.flatten(0, 1))
        return torch.einsum("ndec,tdenm->tcnm", rho[relative], grad).flatten(2)


def tiling(
    spatial: Sequence[int], kernel_size: int, selection: Sequence[int], images: int, width: int, reference: Tensor
):
    """The tiling of ``images`` grids into tiles of about ``width`` queries; ``kernel_size`` 0 means global."""
    if kernel_size == 0:
        return GlobalTiling(spatial, largest_divisor(images, width), width, reference)
    lanes = largest_divisor(images, width // math.prod(spatial[1:]))
    return LocalTiling(spatial, kernel_size, selection, lanes, width, reference)
