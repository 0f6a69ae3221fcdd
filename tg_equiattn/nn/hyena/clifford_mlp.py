"""The Clifford MLP on multivectors."""

from __future__ import annotations

from torch import Tensor, nn

from ... import checks
from ...functional.hyena.clifford import COMPONENTS
from ...precision import full_precision
from .clifford import GradedMLP
from .grades import Grades
from .options import OperatorOptions


class CliffordMLP(nn.Module):
    r"""An O(3)-equivariant multilayer perceptron on multivectors of Cl(3,0).

    A linear map (one channel matrix a grade), ``num_blocks`` blocks of activation, linear map, geometric product and
    layer normalisation (:class:`CliffordBlock`), and a linear map. Tokens are worked through in blocks, which backward
    computes again, so memory is that of inputs and outputs.

    Args:
        in_channels, out_channels: multivector channels.
        hidden_channels: multivector channels between; ``None`` means the larger of both.
        num_blocks: how many blocks. With two, as by default, scalars and vectors reach every grade.
        backend: ``"auto"``, what was measured faster on the device, today torch; ``"torch"``; ``"triton"``, fused
            kernels, which need a CUDA device or Triton's interpreter; or ``"plain"``, torch's operations alone.

    Shapes:
        ``(..., in_channels, 8)`` -> ``(..., out_channels, 8)``, components (1; e1, e2, e3; e23, e31, e12; e123).

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena section 3.2; Ruhe et al., Clifford Group Equivariant Neural Networks (2023).

    Example:
        >>> import torch
        >>> mlp = CliffordMLP(3, 5, hidden_channels=7)
        >>> mlp(torch.randn(2, 11, 3, 8)).shape
        torch.Size([2, 11, 5, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden_channels: int | None = None,
        *,
        num_blocks: int = 2,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        checks.positive(in_channels=in_channels, out_channels=out_channels)
        hidden_channels = max(in_channels, out_channels) if hidden_channels is None else hidden_channels
        checks.positive(hidden_channels=hidden_channels)
        options = OperatorOptions(num_blocks=num_blocks, backend=backend)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.mlp = GradedMLP(Grades(*[in_channels] * 4), Grades(*[out_channels] * 4), hidden_channels, options)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or tuple(x.shape[-2:]) != (self.in_channels, COMPONENTS):
            raise ValueError(f"input must be (..., {self.in_channels}, 8), got {tuple(x.shape)}")
        reference = self.mlp.reference_parameter
        checks.full_parameters(reference)
        checks.same_kind(x, reference)
        checks.half_precision(input=x)
        with full_precision(x.device):
            rows = x.to(reference.dtype).reshape(-1, *x.shape[-2:]).permute(2, 1, 0).flatten(0, 1)
            out = self.mlp.by_blocks(rows)
            out = out.unflatten(0, (COMPONENTS, self.out_channels)).permute(2, 1, 0)
            return out.reshape(*x.shape[:-2], self.out_channels, COMPONENTS)

    def reset_parameters(self) -> None:
        self.mlp.reset_parameters()
