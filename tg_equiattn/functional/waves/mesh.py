"""Sums over points and waves by non-uniform fast Fourier transforms (FINUFFT), with derivatives of any order."""

from __future__ import annotations

import torch
from torch import Tensor

_TOGETHER = 16  # transforms, of two real channels each, whose grids are in memory at once


def mesh_available() -> bool:
    """Whether the extra ``mesh`` is installed."""
    try:
        import pytorch_finufft  # noqa: F401
    except ImportError:
        return False
    return True


def mesh_point_sums(angles: Tensor, numbers: Tensor, sources: Tensor, error: float) -> Tensor:
    """Sums over points at any angles (B, N, 3) in waves of integers (B, D, 3), to a relative error: of c (B, N, M),
    S^cos_k = sum_j cos(n_k . x_j) c_j and S^sin_k = sum_j sin(n_k . x_j) c_j, (B, 2, D, M)."""
    return _Sums.apply(_points, _waves, angles, numbers, sources, error)


def mesh_wave_sums(angles: Tensor, numbers: Tensor, table: Tensor, error: float) -> Tensor:
    """Sums of waves T (B, 2, D, M) at points: sum_k cos(n_k . x_i) T^cos_k + sin(n_k . x_i) T^sin_k, (B, N, M)."""
    return _Sums.apply(_waves, _points, angles, numbers, table, error)


class _Sums(torch.autograd.Function):
    """One of the two sums, of each graph, and the other as its transpose: derivatives are sums of both kinds again."""

    @staticmethod
    def forward(ctx, sums, transpose, angles: Tensor, numbers: Tensor, x: Tensor, error: float) -> Tensor:
        ctx.save_for_backward(angles, numbers, x)
        ctx.sums, ctx.transpose, ctx.error = sums, transpose, error
        return torch.stack([sums(*graph, error) for graph in zip(angles, numbers, x, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        angles, numbers, x = ctx.saved_tensors
        of_angles = of_x = None
        if ctx.needs_input_grad[4]:
            of_x = _Sums.apply(ctx.transpose, ctx.sums, angles, numbers, grad, ctx.error)
        if ctx.needs_input_grad[2]:
            table, at_points = (grad, x) if ctx.sums is _points else (x, grad)
            of_angles = _slopes(angles, numbers, table, at_points, ctx.error)
        return None, None, of_angles, None, of_x, None


def _slopes(angles: Tensor, numbers: Tensor, table: Tensor, at_points: Tensor, error: float) -> Tensor:
    """Derivatives by the angles of sum_im at_points_im f_im, f the sums over the table at points."""
    turned = torch.stack([table[:, 1], -table[:, 0]], 1)
    steps = numbers.to(table.dtype)
    along = (turned * steps[:, None, :, None, axis] for axis in range(3))
    return torch.stack([(mesh_wave_sums(angles, numbers, x, error) * at_points).sum(2) for x in along], 2)


def _points(angles: Tensor, numbers: Tensor, sources: Tensor, error: float) -> Tensor:
    """Of one graph, (2, D, M): pairs of channels as real and imaginary parts of one transform."""
    import pytorch_finufft.functional as transform

    sides, here, there = _grid(numbers)
    real, imaginary = _in_pairs(sources.T).unbind(1)
    pairs = torch.complex(real, imaginary).contiguous()
    out = []
    for part in pairs.split(_TOGETHER):
        modes = transform.finufft_type1(angles.T.contiguous(), part, sides, **_options(error, part, -1)).flatten(1)
        plus, minus = modes[:, here], modes[:, there].conj()
        first, second = (plus + minus) / 2, (plus - minus) / 2j
        out.append(torch.stack([first, second], 1).flatten(0, 1))  # sums of exp(-i n x), as cosines minus i sines
    sums = torch.cat(out)[: sources.shape[1]]
    return torch.stack([sums.real, -sums.imag]).mT


def _waves(angles: Tensor, numbers: Tensor, table: Tensor, error: float) -> Tensor:
    """Of one graph, (N, M): the real parts of sums of exp(i n x) with T^cos - i T^sin; a pair of channels together, as
    real and imaginary part, from modes that are alike but conjugate in opposite waves."""
    import pytorch_finufft.functional as transform

    sides, here, there = _grid(numbers)
    modes = _in_pairs(torch.complex(table[0], -table[1]).T / 2)  # pairs, 2, D
    out = []
    for part in modes.split(_TOGETHER):
        first, second = part.unbind(1)
        grid = part.new_zeros(len(part), sides[0] * sides[1] * sides[2])
        grid.index_add_(1, here, first + 1j * second)
        grid.index_add_(1, there, first.conj() + 1j * second.conj())
        grid = grid.unflatten(1, sides)
        values = transform.finufft_type2(angles.T.contiguous(), grid, **_options(error, part, 1))
        out.append(torch.stack([values.real, values.imag], 1).flatten(0, 1))
    return torch.cat(out)[: table.shape[2]].T.contiguous()


def _in_pairs(channels: Tensor) -> Tensor:
    """Channels (M, ...) two by two, the last beside zeros where they are odd."""
    return torch.nn.functional.pad(channels, (0, 0, 0, channels.shape[0] % 2)).unflatten(0, (-1, 2))


def _grid(numbers: Tensor) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """The sides of the grid of modes, and where on it waves and their opposites lie."""
    half = numbers.abs().amax(0)
    first, second, third = (2 * half + 1).tolist()
    strides = numbers.new_tensor([second * third, third, 1])
    return (first, second, third), (numbers + half) @ strides, (half - numbers) @ strides


def _options(error: float, like: Tensor, sign: int) -> dict[str, float]:
    """Of the library: a third of the promised error, as far as single precision has it; the smaller of its grids, but
    where that would not do."""
    tolerance = max(error / 3, 3e-5 if like.dtype == torch.complex64 else 1e-13)
    options = {"eps": tolerance, "upsampfac": 1.25 if tolerance > 1e-8 else 2.0, "isign": sign, "modeord": 0}
    return options | ({"nthreads": torch.get_num_threads()} if like.device.type == "cpu" else {})
