"""The Clifford MLP on irreps."""

from __future__ import annotations

from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.hyena import GradedMLP, OperatorOptions
from tg_equiattn.precision import full_precision

from .layout import GradeLayout, check_features, clifford_grades


@compile_mode("unsupported")
class CliffordMLP(GradeLayout):
    r"""An E(3)-equivariant multilayer perceptron through multivectors of the geometric algebra Cl(3,0).

    A multivector is ``0e + 1o + 1e + 0o``; linear maps take the input to ``hidden_channels`` of them and back, and
    :class:`~tg_equiattn.nn.hyena.CliffordBlock` is between: activation, linear map, geometric product, layer
    normalisation.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    hidden_channels : int, optional
        multivectors between; by default the largest multiplicity of input or output

    num_blocks : int
        number of blocks; with two, as by default, 0e and 1o reach every irrep there is here

    backend : {'auto', 'torch', 'triton'}
        what was measured faster on the device, today torch; torch; or fused kernels, which need a CUDA device or
        Triton's interpreter

    Examples
    --------
    >>> import torch
    >>> mlp = CliffordMLP("4x0e + 2x1o", "1x0o + 3x1e", hidden_channels=8)
    >>> mlp(torch.randn(11, 10)).shape
    torch.Size([11, 10])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        hidden_channels: int | None = None,
        *,
        num_blocks: int = 2,
        backend: str = "auto",
    ) -> None:
        irreps_in, irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        grades, out_grades = clifford_grades("irreps_in", irreps_in), clifford_grades("irreps_out", irreps_out)
        super().__init__(irreps_in, irreps_out)
        hidden_channels = max(*grades, *out_grades) if hidden_channels is None else hidden_channels
        checks.positive(hidden_channels=hidden_channels)
        options = OperatorOptions(num_blocks=num_blocks, backend=backend)
        if out_grades.only(grades.reachable(num_blocks)) != out_grades:
            raise ValueError(
                f"irreps_out must be reachable from irreps_in={self.irreps_in} by {num_blocks} geometric products, got "
                f"{self.irreps_out}"
            )
        self.mlp = GradedMLP(grades, out_grades, hidden_channels, options)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate on features of shape ``(..., irreps_in.dim)``."""
        reference = self.mlp.reference_parameter
        check_features("x", x, self.features_in, reference, "...")
        with full_precision(x.device):
            out = self.mlp.by_blocks(self.to_rows(x.reshape(-1, x.shape[-1]).to(reference.dtype)))
            return self.to_features(out).reshape(*x.shape[:-1], len(self.columns_out))

    def reset_parameters(self) -> None:
        self.mlp.reset_parameters()
