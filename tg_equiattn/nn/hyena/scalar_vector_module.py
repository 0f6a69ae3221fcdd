"""Scalars and vectors, dense or flat, through a network on tokens by grade."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...sequences import Sequences
from ..not_scriptable import NotScriptable
from .graded_network import GradedNetwork


class ScalarVectorModule(NotScriptable, torch.nn.Module):
    """What users of scalars and vectors call: tensors to rows by grade, the shell, and back.

    Args:
        module: what works on tokens.
        order: ``"input"`` or ``"radial"``.
    """

    def __init__(self, module: GradedNetwork, order: str = "input") -> None:
        super().__init__()
        self.module = module
        self.shell = module.shell(order, "out_vectors")

    def forward(
        self,
        scalars: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        pos: Tensor | None = None,
        order: Tensor | None = None,
        edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scalars and vectors of the tokens; of the sequences, (B, ...), where the module pools.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``; ``None`` where there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``; ``None`` where there are no vector channels.
            lengths: int64 ``(B,)``, the own length of each sequence; what lies beyond is never read, and zero.
            batch: sorted int64 ``(T,)``, the sequence of each flat token; ``None`` means one sequence.
            pos: ``(B, N, 3)`` or ``(T, 3)``; enter relative to the mean of their sequence, as one more vector. Give
                large coordinates (UTM: 5e6) in float64, whatever the features are: float32 rounds them to 0.5.
            order: int64 ``(B, N)`` (places within the sequence) or ``(T,)`` (tokens), a permutation of the tokens of
                every sequence to use in place of the module's.
            edge_index: int64 ``(2, E)``, source and target, tokens counted through the batch (b N + i).
            edge_attr: ``(E, edge_channels)`` scalars of the edges.
            batch_size, max_num_nodes: number of flat sequences and a bound of their lengths, read from ``batch``
                where not given, which torch.compile cannot.
        """
        grades = self.module.in_grades
        first = scalars if scalars is not None else vectors
        if first is None:
            raise ValueError("vectors must be given where scalars are None, got None")
        flat = first.ndim == (2 if first is scalars else 3)
        shape: tuple[int, ...] = tuple(first.shape[: 1 if flat else 2])
        rows = []
        for name, x, axes in (("scalars", scalars, (grades.scalars,)), ("vectors", vectors, (grades.vectors, 3))):
            if x is None and not axes[0]:
                continue
            layout = f"(B, N, {', '.join(map(str, axes))}), or (T, {', '.join(map(str, axes))}) with batch"
            if not isinstance(x, Tensor) or x.ndim != len(shape) + len(axes) or tuple(x.shape) != (*shape, *axes):
                came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be {layout}, alike in both, got {came}")
            checks.same_kind(x, self.module.reference_parameter, name)
            checks.half_precision(**{name: x})
            x = x.flatten(0, len(shape) - 1)
            rows.append(x.T if len(axes) == 1 else x.permute(2, 1, 0).flatten(0, 1))
        if flat:
            if lengths is not None:
                raise ValueError("lengths must be None where the input is flat: use batch")
            sequences = Sequences.from_batch(first, batch, batch_size, max_num_nodes)
        else:
            if batch is not None:
                raise ValueError("batch must be None where the input is (B, N, ...): use lengths")
            checks.lengths(lengths, shape[0], shape[1], first.device)
            sequences = Sequences.dense(shape[0], shape[1], lengths, first.device)
        if pos is not None:
            pos = checks.positions(pos, (*shape, 3), first, "").flatten(0, -2)
        if order is not None and not isinstance(order, Tensor):
            raise ValueError(f"order must be a permutation as a tensor, or None for the module's, got {order!r}")
        if order is not None and not flat:
            if tuple(order.shape) != shape:
                raise ValueError(f"order must have shape {shape}, got {tuple(order.shape)}")
            order = (order + shape[1] * torch.arange(shape[0], device=order.device)[:, None]).flatten()
        out = self.shell.run(
            self.module, torch.cat(rows), pos, sequences, reference=self.module.reference_parameter,
            order=order, edge_index=edge_index, edge_attr=edge_attr,
        )  # fmt: skip
        shape = (sequences.count,) if self.module.pool else shape
        grades = self.module.out_grades
        out_scalars, out_vectors, *_ = grades.split(out)
        out_scalars = out_scalars[0].T.reshape(*shape, grades.scalars)
        return out_scalars, out_vectors.permute(2, 1, 0).reshape(*shape, grades.vectors, 3)

    @property
    def local_context(self) -> bool:
        """Whether edges are wanted."""
        return self.shell.local_context

    @property
    def order(self) -> str:
        """Of the tokens along their sequence."""
        return self.shell.order

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def extra_repr(self) -> str:
        inside, outside = self.module.in_grades, self.module.out_grades
        return f"{inside.scalars}, {inside.vectors} -> {outside.scalars}, {outside.vectors}, order={self.order!r}"
