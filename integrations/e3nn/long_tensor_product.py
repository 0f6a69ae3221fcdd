"""Long convolution of any irreps by Clebsch-Gordan paths in the Fourier domain."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from tg_equiattn.checks import python_numbers
from tg_equiattn.functional.hyena.long_conv import bilinear_long_conv
from tg_equiattn.modes import full_precision
from tg_equiattn.nn.modules import NotScriptable, StoresSettings
from tg_equiattn.nn.vector.sequences import ChainArguments, Sequences
from tg_equiattn.node_batch import NodeBatch, PaddedBatch
from tg_equiattn.slots import Slots

from .layout import Features, check_features, like_its_copies

if TYPE_CHECKING:
    from jaxtyping import Float


@compile_mode("unsupported")
@python_numbers
class LongTensorProduct(NotScriptable, StoresSettings):
    r"""Tensor-product long convolution over the nodes of each graph, with learned path weights.

    .. math::

        u_i = \frac{1}{n} \sum_j x^{(1)}_j \otimes_w x^{(2)}_{i-j}

    Here :math:`\otimes_w` is an `e3nn.o3.TensorProduct`, and n is the graph's own number of nodes. Indices are taken
    modulo n; with ``causal=True`` the sum runs over past nodes only. The tensor product is bilinear, so it is evaluated
    at frequencies instead of pairs, three times for each frequency: this takes :math:`O(N \log N)` time. The path
    ``1o x 1o -> 1e`` is, except for its weight, :func:`tg_equiattn.functional.vector_long_conv`.

    The layer extends section 3.2 of the `SE(3)-Hyena Operator for Scalable Equivariant Learning
    <https://arxiv.org/abs/2407.01049>`_ paper from vectors to all irreps.

    Parameters
    ----------
    irreps_in1 : `e3nn.o3.Irreps`
        irreps of the first input

    irreps_in2 : `e3nn.o3.Irreps`
        irreps of the second input

    irreps_out : `e3nn.o3.Irreps`
        irreps of the output

    instructions : list of tuple, optional
        paths of the product, as for `e3nn.o3.TensorProduct`; by default all that the selection rules allow, fully
        connected, so that the number of weights grows as the cube of multiplicities; use instructions with ``'uuu'``
        for few weights or none; all nodes share the weights

    causal : bool
        whether nodes see earlier nodes only, by default ``False``

    Examples
    --------
    >>> import torch
    >>> conv = LongTensorProduct("4x0e + 2x2e", "4x0e + 2x1o", "3x1o + 1x3o")
    >>> conv(torch.randn(12, 14), torch.randn(12, 10), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([12, 16])
    """

    def __init__(
        self,
        irreps_in1: o3.Irreps | str,
        irreps_in2: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        *,
        instructions: list[tuple] | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__()
        irreps = o3.Irreps(irreps_in1), o3.Irreps(irreps_in2), o3.Irreps(irreps_out)
        if instructions is None:
            product: o3.TensorProduct = o3.FullyConnectedTensorProduct(*irreps, shared_weights=True)
        else:
            product = o3.TensorProduct(*irreps, instructions, shared_weights=True)
        self.tensor_product = like_its_copies(product)
        if not self.tensor_product.instructions:
            raise ValueError(f"irreps_out must have a path from {irreps[0]} x {irreps[1]}, got {irreps[2]}")
        self.mode, self.norm = "causal" if causal else "circular", "forward"
        self.irreps_in1, self.irreps_in2 = self.tensor_product.irreps_in1, self.tensor_product.irreps_in2
        self.irreps_out = self.tensor_product.irreps_out
        self._dim: int = self.irreps_out.dim  # compilers do not look into irreps
        self._features = Features.of(self.irreps_in1), Features.of(self.irreps_in2)

    def settings(self) -> dict[str, Any]:
        paths = [(*path[:5], f"{path.path_weight:.6g}") for path in self.instructions]
        digest = hashlib.sha256(repr(paths).encode()).hexdigest()[:16]
        return {
            "causal": self.mode == "causal", "irreps_in1": str(self.irreps_in1), "irreps_in2": str(self.irreps_in2),
            "irreps_out": str(self.irreps_out),
            "instructions": {"digest": digest, "text": f"{len(paths)} paths ({digest})"},
        }  # fmt: skip

    @property
    def _reference(self) -> Tensor:
        """A tensor with the dtype and device of the module, with or without weights."""
        return self.tensor_product.weight

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
        *,
        index: Tensor | None = None,
        chain: Tensor | None = None,
        order: Tensor | None = None,
        batch_size: int | None = None,
        num_chains: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate.

        Parameters
        ----------
        x1 : `torch.Tensor`
            features of shape ``(nodes, irreps_in1.dim)``

        x2 : `torch.Tensor`
            features of shape ``(nodes, irreps_in2.dim)``

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        index : `torch.Tensor`, optional
            the number of each node along its chain, integers of shape ``(nodes,)``, for example its residue number; it
            must increase strictly; convolutions take differences of it as lags, so that missing nodes count as zero;
            steps above 128 count as 128; without it no node is missing

        chain : `torch.Tensor`, optional
            any number for each chain, integers of shape ``(nodes,)``; convolutions run along each chain of a graph by
            itself; without it each graph is one chain

        order : `torch.Tensor`, optional
            a permutation of the nodes within each graph, of shape ``(nodes,)``

        batch_size : int, optional
            number of graphs; by default it is read from ``batch``, which torch.compile cannot do, and for which CUDA
            waits

        num_chains : int, optional
            number of chains in the batch, or a bound of it; by default it is read from ``chain``, which torch.compile
            cannot do, and for which CUDA waits

        max_num_nodes : int, optional
            a bound of the sizes of graphs, and of the spans of ``index``; by default it is read from ``batch`` and
            ``index``, which torch.compile cannot do, and for which CUDA waits

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        check_features("x1", x1, self._features[0], self._reference)
        check_features("x2", x2, self._features[1], self._reference)
        if x1.shape[0] != x2.shape[0]:
            raise ValueError(f"x2 must have the {x1.shape[0]} nodes of x1, got {x2.shape[0]}")
        node_batch = NodeBatch.flat(x1, batch, batch_size, max_num_nodes)
        along = ChainArguments(order, index, chain, num_chains, max_num_nodes)
        along.check(node_batch)
        order, sequences = along.place(node_batch, order)
        slots = None if order is None else Slots.of_order(order)
        with full_precision(x1.device):
            x1, x2 = (x.to(self._reference.dtype) for x in (x1, x2))
            x1, x2 = (x if slots is None else slots.pack(x) for x in (x1, x2))
            out = self.convolve(x1.T, x2.T, sequences)
            return (out if slots is None else slots.unpack(out, 1)).T.contiguous()

    def convolve(
        self, x1: Float[Tensor, "dim1 nodes"], x2: Float[Tensor, "dim2 nodes"], sequences: Sequences
    ) -> Float[Tensor, "dim_out nodes"]:
        """Evaluate on checked features, with their channels first, and sequences."""
        if not x1.numel() or not x2.numel() or not self._dim:
            return x1.new_zeros(self._dim, x1.shape[1])

        def convolution(a: Tensor, b: Tensor, rows: PaddedBatch) -> Tensor:
            with _recomputed_whole(self.tensor_product):
                return bilinear_long_conv(
                    a, b, self.tensor_product, rows.lengths, self.mode, self.norm, sequences.counts(rows)
                )

        return sequences.mix(convolution, x1, x2)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.irreps_in1.simplify()} x {self.irreps_in2.simplify()} -> "
            f"{self.irreps_out.simplify()} | {len(self.instructions)} paths | {self.weight_numel} weights)"
        )


def _recomputed_whole(product: torch.nn.Module) -> AbstractContextManager[None]:
    """A context that disables the early stop of checkpoints. The early stop is an exception, which fails in the
    TorchScript of e3nn 0.4.4's products."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in product.children())
    return set_checkpoint_early_stop(False) if scripted else nullcontext()
