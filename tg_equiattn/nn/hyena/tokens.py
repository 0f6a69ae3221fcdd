"""From what users give to tokens (rows, T), checked, and through a graded module; shared with integrations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import checks
from ...precision import full_precision
from ...sequences import ORDERS, Sequences, check_order, radial_order
from .clifford import Grades
from .graded import GradedModel, GradedOperator
from .local_context import POSITION, Edges

Graded = GradedOperator | GradedModel


def check_order_name(order: str) -> None:
    checks.choice("order", order, ORDERS)


def check_reach(module: Graded, name: str) -> None:
    """Raise ValueError where grades tell that part of the output is zero whatever comes in."""
    reached = module.reached(module.in_grades.plus(POSITION))
    if reached != module.out_grades:
        names = ("0e", "1o", "1e", "0o")
        lost = [n for n, wanted, found in zip(names, module.out_grades, reached, strict=True) if wanted and not found]
        raise ValueError(
            f"{name} must be reachable by geometric products, got {' + '.join(lost)} that would always be zero: have "
            "it among the hidden channels, or more num_blocks"
        )


def run(
    module: Graded,
    x: Tensor,
    pos: Tensor | None,
    sequences: Sequences,
    *,
    order: str | Tensor = "input",
    edge_index: Tensor | None = None,
    edge_attr: Tensor | None = None,
) -> Tensor:
    """Tokens (rows, T), positions (T, 3), edges (2, E) with scalars (E, edge_channels), through a module."""
    dtype = module.like.dtype
    checks.full_parameters(module.like)
    if pos is None:
        if module.reached(module.in_grades) != module.out_grades:
            raise ValueError(
                "pos must be given: without positions no vectors enter, and part of the output would be zero; got None"
            )
        if isinstance(order, str) and order == "radial":
            raise ValueError("pos must be given with order='radial', got None")
    with full_precision(x.device):
        x = sequences.padding_is_zero(x.to(dtype))
        scalars = x[: module.in_grades.scalars]
        if pos is None:
            pos = x.new_zeros(3, sequences.tokens)
        else:
            pos = checks.positions(pos, (sequences.tokens, 3), x, "")
            pos = pos.to(torch.promote_types(pos.dtype, dtype) if pos.is_floating_point() else torch.float64)
            pos = sequences.padding_is_zero(pos.T)
            if isinstance(order, str) and order == "radial":
                order = radial_order(pos, sequences, scalars)
            pos = sequences.padding_is_zero(sequences.centred(pos).to(dtype))
        if isinstance(order, Tensor):
            check_order(order, sequences)
            sequences = sequences.ordered(order)
        edges = _edges(module, edge_index, edge_attr, x, sequences)
        out = module(x, pos, sequences, edges)
        return out if module.pool else sequences.padding_is_zero(out)


def _edges(
    module: Graded, edge_index: Tensor | None, edge_attr: Tensor | None, x: Tensor, sequences: Sequences
) -> Edges | None:
    if (edge_index is not None) != bool(module.local):
        wanted = "given with local_context=True" if edge_index is None else "None without local_context=True"
        raise ValueError(f"edge_index must be {wanted}, got {'None' if edge_index is None else 'edges'}")
    if (edge_attr is not None) != bool(module.edge_channels):
        came = "None" if edge_attr is None else "some"
        raise ValueError(f"edge_attr must have edge_channels={module.edge_channels} scalars an edge, got {came}")
    if edge_index is None:
        return None
    for name, value in (("edge_index", edge_index), ("edge_attr", edge_attr)):
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if edge_index.dtype != torch.int64 or edge_index.ndim != 2 or len(edge_index) != 2:
        raise ValueError(f"edge_index must be int64 (2, E), got {edge_index.dtype} of shape {tuple(edge_index.shape)}")
    if edge_index.device != x.device:
        raise ValueError(f"edge_index must be on {x.device} as the input is, got {edge_index.device}")
    if checks.values_are_free(edge_index) and edge_index.numel():
        low, high = int(edge_index.min()), int(edge_index.max())
        if low < 0 or high >= sequences.tokens:
            raise ValueError(f"edge_index must join nodes in [0, {sequences.tokens}), got {low} to {high}")
        if bool((sequences.batch[edge_index[0]] != sequences.batch[edge_index[1]]).any()):
            raise ValueError("edge_index must join nodes of the same graph, got an edge between two")
        if sequences.there is not None and not bool(sequences.there[edge_index].all()):
            raise ValueError("edge_index must join tokens that exist, got one beyond its sequence's length")
    if edge_attr is None:
        return Edges(edge_index, x.new_zeros(0, edge_index.shape[1]))
    edge_attr = edge_attr[:, None] if edge_attr.ndim == 1 else edge_attr
    shape = edge_index.shape[1], module.edge_channels
    if tuple(edge_attr.shape) != shape or edge_attr.is_complex():
        raise ValueError(
            f"edge_attr must be real numbers of shape {shape}, got {edge_attr.dtype} of {tuple(edge_attr.shape)}"
        )
    if edge_attr.device != x.device:
        raise ValueError(f"edge_attr must be on {x.device} as the input is, got {edge_attr.device}")
    return Edges(edge_index, edge_attr.to(x.dtype).T)


class TokenModule(nn.Module):
    """Scalars and vectors, dense or flat, through a graded module; the shell of the modules here.

    Args:
        module: what works on tokens.
        order: ``"input"`` or ``"radial"``.
    """

    def __init__(self, module: Graded, order: str = "input") -> None:
        super().__init__()
        check_order_name(order)
        check_reach(module, "out_vectors")
        self.order = order
        self.module = module

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
            pos: ``(B, N, 3)`` or ``(T, 3)``; enter relative to the mean of their sequence, as one more vector.
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
            checks.same_kind(x, self.module.like, name)
            checks.half_precision(**{name: x})
            x = x.flatten(0, len(shape) - 1)
            rows.append(x.T if len(axes) == 1 else x.permute(2, 1, 0).flatten(0, 1))
        if flat:
            if lengths is not None:
                raise ValueError("lengths must be None where the input is flat: use batch")
            sequences = Sequences.checked(first, batch, batch_size, max_num_nodes)
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
        out = run(
            self.module, torch.cat(rows), pos, sequences, order=self.order if order is None else order,
            edge_index=edge_index, edge_attr=edge_attr,
        )  # fmt: skip
        shape = (sequences.count,) if self.module.pool else shape
        grades = self.module.out_grades
        out_scalars, out_vectors, *_ = grades.split(out)
        out_scalars = out_scalars[0].T.reshape(*shape, grades.scalars)
        return out_scalars, out_vectors.permute(2, 1, 0).reshape(*shape, grades.vectors, 3)

    @property
    def local_context(self) -> bool:
        """Whether edges are wanted."""
        return bool(self.module.local)

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def extra_repr(self) -> str:
        inside, outside = self.module.in_grades, self.module.out_grades
        return f"{inside.scalars}, {inside.vectors} -> {outside.scalars}, {outside.vectors}, order={self.order!r}"


def grades_of(names: tuple[str, str], scalars: int | None, vectors: int | None, default: Grades) -> Grades:
    """Grades of so many scalars and vectors, those of ``default`` where None; ValueError for negative or none."""
    chosen = default.scalars if scalars is None else scalars, default.vectors if vectors is None else vectors
    for name, value in zip(names, chosen, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer from 0 on, got {value!r}")
    if not any(chosen):
        raise ValueError(f"{names[0]} and {names[1]} must not both be 0")
    return Grades(*chosen)
