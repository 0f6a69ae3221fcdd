"""Long convolution of any irreps by Clebsch-Gordan paths in the Fourier domain."""

from __future__ import annotations

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.functional.hyena.fourier_product import MODES, invert, transform
from tg_equiattn.precision import full_precision
from tg_equiattn.sequences import Sequences, check_order, token_blocks

from .layout import Features, check_features

_BUDGET = {"cpu": 1 << 20, "other": 1 << 26}  # products of two features at a time


@compile_mode("unsupported")
class LongTensorProduct(torch.nn.Module):
    r"""Tensor-product long convolution over the nodes of each graph, with learned path weights.

    .. math::

        u_i = \frac{1}{n} \sum_j x^{(1)}_j \otimes_w x^{(2)}_{i-j}

    with :math:`\otimes_w` an `e3nn.o3.TensorProduct`, n the graph's own number of nodes, and indices modulo n
    (``mode='circular'``) or past nodes only (``mode='causal'``). The tensor product is bilinear, so it is evaluated at
    frequencies instead of pairs: three evaluations a frequency, :math:`O(N \log N)` in all. The path
    ``1o x 1o -> 1e`` is, but for its weight, the long convolution by cross products of
    :func:`tg_equiattn.functional.vector_long_conv`.

    The idea of the `SE(3)-Hyena Operator for Scalable Equivariant Learning <https://arxiv.org/abs/2407.01049>`_ paper,
    section 3.2, beyond vectors.

    Parameters
    ----------
    irreps_in1, irreps_in2, irreps_out : `e3nn.o3.Irreps`
        any irreps

    instructions : list of tuple, optional
        as of `e3nn.o3.TensorProduct`; by default all paths the selection rules allow, fully connected, as
        `e3nn.o3.FullyConnectedTensorProduct`

    mode : {'circular', 'causal'}
        of the convolution

    irrep_normalization, path_normalization : str, optional
        as of `e3nn.o3.TensorProduct`

    internal_weights : bool, optional
        as of `e3nn.o3.TensorProduct`; if ``False``, ``weight`` is given to every call. Weights are shared by all
        nodes: a convolution has no others.

    Examples
    --------
    >>> import torch
    >>> conv = LongTensorProduct("4x0e + 2x2e", "4x0e + 2x1o", "3x1o + 1x3o")
    >>> conv(torch.randn(12, 14), torch.randn(12, 10), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([12, 16])
    """

    _like: Tensor

    def __init__(
        self,
        irreps_in1: o3.Irreps | str,
        irreps_in2: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        *,
        instructions: list[tuple] | None = None,
        mode: str = "circular",
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
    ) -> None:
        super().__init__()
        checks.choice("mode", mode, MODES)
        irreps = o3.Irreps(irreps_in1), o3.Irreps(irreps_in2), o3.Irreps(irreps_out)
        options = {
            "irrep_normalization": irrep_normalization, "path_normalization": path_normalization,
            "internal_weights": internal_weights, "shared_weights": True,
        }  # fmt: skip
        if instructions is None:
            self.tensor_product = o3.FullyConnectedTensorProduct(*irreps, **options)
        else:
            self.tensor_product = o3.TensorProduct(*irreps, instructions, **options)
        if not self.tensor_product.instructions:
            raise ValueError(f"irreps_out must have a path from {irreps[0]} x {irreps[1]}, got {irreps[2]}")
        self.mode = mode
        self.irreps_in1, self.irreps_in2 = self.tensor_product.irreps_in1, self.tensor_product.irreps_in2
        self.irreps_out = self.tensor_product.irreps_out
        self.register_buffer("_like", torch.empty(0), persistent=False)  # dtype and device, without weights too

    @property
    def instructions(self):
        return self.tensor_product.instructions

    @property
    def weight_numel(self) -> int:
        return self.tensor_product.weight_numel

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        batch: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        order: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate.

        Parameters
        ----------
        x1, x2 : `torch.Tensor`
            features of shape ``(nodes, irreps_in1.dim)`` and ``(nodes, irreps_in2.dim)``

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        weight : `torch.Tensor`, optional
            of shape ``(weight_numel,)``, required if ``internal_weights`` is ``False``

        order : `torch.Tensor`, optional
            a permutation of the nodes within each graph, of shape ``(nodes,)``, along which to convolve

        batch_size, max_num_nodes : int, optional
            number of graphs, and a bound of their sizes, read from ``batch`` where not given

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        features = Features.of(self.irreps_in1), Features.of(self.irreps_in2)
        check_features("x1", x1, features[0], self._like)
        check_features("x2", x2, features[1], self._like)
        if len(x1) != len(x2):
            raise ValueError(f"x2 must have the {len(x1)} nodes of x1, got {len(x2)}")
        if weight is None and self.weight_numel and not self.tensor_product.internal_weights:
            raise ValueError(f"weight must be given, of shape ({self.weight_numel},), with internal_weights=False")
        if weight is not None:
            if not isinstance(weight, Tensor) or tuple(weight.shape) != (self.weight_numel,):
                came = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
                raise ValueError(f"weight must have shape ({self.weight_numel},), got {came}")
            checks.same_kind(weight, self._like, "weight")
            weight = weight.to(self._like.dtype)
        sequences = Sequences.checked(x1, batch, batch_size, max_num_nodes)
        if order is not None:
            check_order(order, sequences)
            sequences = sequences.ordered(order)
        return self.convolve(x1, x2, sequences, weight)

    def convolve(self, x1: Tensor, x2: Tensor, sequences: Sequences, weight: Tensor | None = None) -> Tensor:
        """Evaluate on sequences that are known."""
        if not len(x1):
            return x1.new_zeros(0, self.irreps_out.dim)
        step = _BUDGET.get(x1.device.type, _BUDGET["other"]) // (self.irreps_in1.dim * self.irreps_in2.dim)

        def product(*parts: Tensor) -> Tensor:
            a, b, c, d = (part.T for part in parts)
            first, last = self.tensor_product(a, c, weight), self.tensor_product(b, d, weight)
            both = self.tensor_product(a + b, c + d, weight)
            return torch.cat([first - last, both - first - last], -1).T

        def kernel(a: Tensor, b: Tensor, lengths: Tensor | None) -> Tensor:
            x, y, total = transform(a, b, lengths, self.mode)
            parts = [part.flatten(1) for part in (x.real, x.imag, y.real, y.imag)]
            real, imaginary = token_blocks(product, max(64, step), parts).unflatten(-1, x.shape[1:]).chunk(2)
            return invert(torch.complex(real, imaginary), total, a.shape[-1], lengths, self.mode)

        with full_precision(x1.device):
            return sequences.mix(kernel, x1.to(self._like.dtype).T, x2.to(self._like.dtype).T).T

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.irreps_in1.simplify()} x {self.irreps_in2.simplify()} -> "
            f"{self.irreps_out.simplify()} | {len(self.instructions)} paths | {self.weight_numel} weights)"
        )
