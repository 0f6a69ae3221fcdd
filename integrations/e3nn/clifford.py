"""The Clifford MLP on irreps."""

from __future__ import annotations

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.functional.backend import check_backend
from tg_equiattn.nn.hyena.clifford import PRODUCTS, GradedMLP
from tg_equiattn.precision import full_precision
from tg_equiattn.sequences import token_blocks

from .layout import Features, check_features, clifford_grades, describe, rows_by_grade


@compile_mode("unsupported")
class CliffordMLP(torch.nn.Module):
    r"""An E(3)-equivariant multilayer perceptron through multivectors of the geometric algebra Cl(3,0).

    A multivector is ``0e + 1o + 1e + 0o``; linear maps take the input to ``hidden_channels`` of them and back, and
    :class:`~tg_equiattn.nn.clifford.CliffordBlock` is between: activation, linear map, geometric product, layer
    normalisation.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    hidden_channels : int, optional
        multivectors between; by default the largest multiplicity of input or output

    num_blocks : int
        number of blocks

    product : {'channelwise', 'full'}
        whether products stay within a channel or are summed over all channels

    backend : {'auto', 'torch', 'triton'}
        what was measured faster on the device, today torch; torch; or fused kernels, which need a CUDA device or
        Triton's interpreter; products summed over all channels are matrix products, and torch's whatever the backend

    Examples
    --------
    >>> import torch
    >>> mlp = CliffordMLP("4x0e + 2x1o", "1x0o + 3x1e", hidden_channels=8)
    >>> mlp(torch.randn(11, 10)).shape
    torch.Size([11, 10])
    """

    rows_in: Tensor
    columns_out: Tensor

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        hidden_channels: int | None = None,
        *,
        num_blocks: int = 2,
        product: str = "channelwise",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        grades, out_grades = (
            clifford_grades("irreps_in", self.irreps_in),
            clifford_grades("irreps_out", self.irreps_out),
        )
        hidden_channels = max(*grades, *out_grades) if hidden_channels is None else hidden_channels
        checks.positive(hidden_channels=hidden_channels, num_blocks=num_blocks)
        checks.choice("product", product, PRODUCTS)
        check_backend(backend)
        if out_grades.masked(grades.reached(num_blocks)) != out_grades:
            raise ValueError(
                f"irreps_out must be reachable from irreps_in={self.irreps_in} by {num_blocks} geometric products, got "
                f"{self.irreps_out}"
            )
        self._features = Features.of(self.irreps_in)
        self.mlp = GradedMLP(grades, out_grades, hidden_channels, num_blocks, product, backend)
        self.register_buffer("rows_in", rows_by_grade(self.irreps_in), persistent=False)
        self.register_buffer("columns_out", rows_by_grade(self.irreps_out).argsort(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate on features of shape ``(..., irreps_in.dim)``."""
        check_features("x", x, self._features, self.mlp.like, "...")
        with full_precision(x.device):
            rows = x.reshape(-1, x.shape[-1]).to(self.mlp.like.dtype).T.index_select(0, self.rows_in)
            out = token_blocks(self.mlp, self.mlp.step(x.device), [rows])
            return out.index_select(0, self.columns_out).T.reshape(*x.shape[:-1], len(self.columns_out))

    def reset_parameters(self) -> None:
        self.mlp.reset_parameters()

    def __repr__(self) -> str:
        return describe(self)
