"""Sums over nodes and reciprocal vectors by non-uniform fast Fourier transforms (FINUFFT)."""

from __future__ import annotations

import functools
import importlib
import math
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

_TOGETHER = 16  # number of transforms, of two real channels each, whose grids are in memory at once
_PLANS = 8  # number of plans that are kept for the next call, each with the memory of its grid
_LIBRARIES = {"cpu": "finufft", "cuda": "cufinufft"}


@functools.cache
def nufft_available(kind: str) -> bool:
    """True if the library for non-uniform fast Fourier transforms on a kind of device can be imported."""
    try:
        importlib.import_module(_LIBRARIES[kind])
    except (ImportError, KeyError):
        return False
    return True


def sums_over_nodes(
    angles: Float[Tensor, "graphs nodes 3"], indices: Int[Tensor, "graphs vectors 3"],
    sources: Float[Tensor, "graphs nodes channels"], error: float,
) -> Float[Tensor, "graphs 2 vectors channels"]:  # fmt: skip
    """Sums over nodes j for all reciprocal vectors k: sum_j cos(n_k . x_j) c_j and sum_j sin(n_k . x_j) c_j, with
    angles x, integers n and sources c, to a relative ``error``."""
    return _Sums.apply(_over_nodes, _at_nodes, angles, indices, sources, error)


def sums_at_nodes(
    angles: Float[Tensor, "graphs nodes 3"], indices: Int[Tensor, "graphs vectors 3"],
    table: Float[Tensor, "graphs 2 vectors channels"], error: float,
) -> Float[Tensor, "graphs nodes channels"]:  # fmt: skip
    """Sums over reciprocal vectors k at all nodes i: sum_k cos(n_k . x_i) T^cos_k + sin(n_k . x_i) T^sin_k, for a table
    T, to a relative ``error``."""
    return _Sums.apply(_at_nodes, _over_nodes, angles, indices, table, error)


class _Sums(torch.autograd.Function):
    """A sum over nodes or over reciprocal vectors, for each graph. The two sums are transposes of each other.

    Backward calls this function with the two sums swapped, so it has derivatives of any order; a registered operator
    would need one more backward operator for each order. Tracers never reach it, since reciprocal vectors are read.
    """

    @staticmethod
    def forward(ctx, sums, transpose, angles: Tensor, indices: Tensor, x: Tensor, error: float) -> Tensor:
        ctx.save_for_backward(angles, indices, x)
        ctx.sums, ctx.transpose, ctx.error = sums, transpose, error
        return torch.stack([sums(*graph, error) for graph in zip(angles, indices, x, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        angles, indices, x = ctx.saved_tensors
        of_angles = of_x = None
        if ctx.needs_input_grad[4]:
            of_x = _Sums.apply(ctx.transpose, ctx.sums, angles, indices, grad, ctx.error)
        if ctx.needs_input_grad[2]:
            table, at_nodes = (grad, x) if ctx.sums is _over_nodes else (x, grad)
            of_angles = _slopes(angles, indices, table, at_nodes, ctx.error)
        return None, None, of_angles, None, of_x, None


def _slopes(angles: Tensor, indices: Tensor, table: Tensor, at_nodes: Tensor, error: float) -> Tensor:
    """Derivatives by the angles of the scalar product of ``at_nodes`` and the sums of ``table`` at nodes."""
    rotated = torch.stack([table[:, 1], -table[:, 0]], 1)
    steps = indices.to(table.dtype)
    along = (rotated * steps[:, None, :, None, axis] for axis in range(3))
    return torch.stack([(sums_at_nodes(angles, indices, x, error) * at_nodes).sum(2) for x in along], 2)


def _over_nodes(angles: Tensor, indices: Tensor, sources: Tensor, error: float) -> Tensor:
    """:func:`sums_over_nodes` of one graph. A pair of channels is the real and imaginary part of one transform."""
    sides, index, opposite = _grid(indices)
    pairs = torch.complex(*_in_pairs(sources.T).unbind(1)).contiguous()
    out = []
    for chunk in pairs.split(_TOGETHER):
        modes = _transform(1, angles, chunk, sides, error).flatten(1)
        plus, minus = modes[:, index], modes[:, opposite].conj()
        first, second = (plus + minus) / 2, (plus - minus) / 2j
        out.append(torch.stack([first, second], 1).flatten(0, 1))  # sums of exp(-i n x), as cosines minus i sines
    sums = torch.cat(out)[: sources.shape[1]]
    return torch.stack([sums.real, -sums.imag]).mT


def _at_nodes(angles: Tensor, indices: Tensor, table: Tensor, error: float) -> Tensor:
    """:func:`sums_at_nodes` of one graph: the real parts of sums of exp(i n x) (T^cos - i T^sin). A pair of channels is
    the real and imaginary part of one transform, each with modes that are conjugate at opposite vectors."""
    sides, index, opposite = _grid(indices)
    modes = _in_pairs(torch.complex(table[0], -table[1]).T / 2)  # pairs, 2, D
    out = []
    for chunk in modes.split(_TOGETHER):
        first, second = chunk.unbind(1)
        grid = chunk.new_zeros(len(chunk), sides[0] * sides[1] * sides[2])
        grid.index_add_(1, index, first + 1j * second)
        grid.index_add_(1, opposite, first.conj() + 1j * second.conj())
        values = _transform(2, angles, grid.unflatten(1, sides), sides, error)
        out.append(torch.stack([values.real, values.imag], 1).flatten(0, 1))
    return torch.cat(out)[: table.shape[2]].T.contiguous()


def _in_pairs(channels: Shaped[Tensor, "channels numbers"]) -> Shaped[Tensor, "pairs 2 numbers"]:
    """Channels in pairs; if their number is odd, the last channel is paired with zeros."""
    return torch.nn.functional.pad(channels, (0, 0, 0, channels.shape[0] % 2)).unflatten(0, (-1, 2))


def _grid(indices: Tensor) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """Sides of the grid of modes, and the indices of n and of -n on it."""
    half = indices.abs().amax(0)
    first, second, third = (2 * half + 1).tolist()
    strides = indices.new_tensor([second * third, third, 1])
    index, opposite = (((half + n) * strides).sum(1) for n in (indices, -indices))  # CUDA has no integer matrix product
    return (first, second, third), index, opposite


def _transform(kind: int, angles: Tensor, data: Tensor, sides: tuple[int, int, int], error: float) -> Tensor:
    """Non-uniform transforms of (transforms, nodes) to modes (kind 1, with exp(-i n x)), or of (transforms, *sides) to
    nodes (kind 2, with exp(i n x)).

    The tolerance is a third of the promised error, or what the precision allows. On CPUs the smaller of the library's
    two grids is used if it is accurate enough; some releases of cufinufft do not have it.
    """
    device, single = data.device, data.dtype == torch.complex64
    tolerance = max(error / 3, 3e-5 if single else 1e-13)
    if device.type == "cpu":
        upsampling = 1.25 if tolerance > 1e-8 else 2.0
        options: dict[str, Any] = {"nthreads": torch.get_num_threads(), "upsampfac": upsampling}
    else:
        options = {"gpu_device_id": device.index, "gpu_stream": torch.cuda.current_stream(device).cuda_stream}
    dtype = "complex64" if single else "complex128"
    names = tuple(sorted(options.items()))
    plan = _plan(threading.get_ident(), device.type, kind, sides, len(data), tolerance, dtype, names)
    points = angles.detach().remainder(2 * math.pi).T.contiguous()
    if device.type == "cuda":
        plan.setpts(*points)
        return plan.execute(data)
    plan.setpts(*points.numpy())
    return torch.from_numpy(plan.execute(data.numpy()))


@functools.lru_cache(_PLANS)
def _plan(
    thread: int, device: str, kind: int, sides: tuple[int, int, int], transforms: int, tolerance: float, dtype: str,
    options: tuple[tuple[str, Any], ...],
) -> Any:  # fmt: skip
    """The plan of a ``thread`` for a stream of a device. A plan holds the points of a call, so threads cannot share
    one."""
    library = importlib.import_module(_LIBRARIES[device])
    return library.Plan(kind, sides, transforms, tolerance, 1 if kind == 2 else -1, dtype, **dict(options))
