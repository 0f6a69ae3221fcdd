"""Reads scalars and vectors, dense or flat, as tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import checks
from ..node_batch import NodeBatch
from ..ranks import Ranks


class Tokens(NamedTuple):
    """Checked tokens.

    Attributes:
        shape: (B, N) for dense input, (T,) for flat input.
        scalars: (T, S), with T = B N for dense input.
        vectors: (T, V, 3).
        node_batch: the sequences.
    """

    shape: tuple[int, ...]
    scalars: Tensor
    vectors: Tensor
    node_batch: NodeBatch


def read_tokens(
    scalars: Tensor | None, vectors: Tensor | None, channels: tuple[int, int], reference: Tensor,
    lengths: Tensor | None, batch: Tensor | None, batch_size: int | None, max_num_nodes: int | None,
    ranks: Ranks | None = None,
) -> Tokens:  # fmt: skip
    """Read scalars ``(B, N, S)`` or ``(T, S)`` and vectors ``(B, N, V, 3)`` or ``(T, V, 3)``, or None for no channels.

    Raise ValueError, naming the argument, unless they have ``channels`` and the dtype and device of ``reference``."""
    first, axes = (scalars, 1) if scalars is not None else (vectors, 2)
    if first is None:
        raise ValueError("vectors must be given if scalars are None, got None")
    flat = isinstance(first, Tensor) and first.ndim == 1 + axes
    shape = tuple(first.shape[: 1 if flat else 2]) if isinstance(first, Tensor) else ()
    out = []
    for name, x, sizes in (("scalars", scalars, (channels[0],)), ("vectors", vectors, (channels[1], 3))):
        if x is None and not sizes[0]:
            x = first.new_zeros(*shape, *sizes)
        if not isinstance(x, Tensor) or x.ndim != len(shape) + len(sizes) or tuple(x.shape) != (*shape, *sizes):
            layout = f"(B, N, {', '.join(map(str, sizes))}), or (T, {', '.join(map(str, sizes))}) with batch"
            same = "with the same B, N or T in scalars and vectors"
            raise ValueError(f"{name} must be {layout}, {same}, got {checks.shape_of(x)}")
        checks.of_points(x, reference, name)
        out.append(x.flatten(0, len(shape) - 1))
    if flat:
        if lengths is not None:
            raise ValueError("lengths must be None for flat input (T, ...), got a tensor: use batch")
        return Tokens(shape, out[0], out[1], NodeBatch.flat(first, batch, batch_size, max_num_nodes, ranks))
    if batch is not None or ranks is not None:
        name = "process_group" if batch is None else "batch"
        raise ValueError(f"{name} must be None for input (B, N, ...), got one: use lengths, or flat tokens (T, ...)")
    checks.lengths(lengths, shape[0], shape[1], first.device)
    return Tokens(shape, out[0], out[1], NodeBatch.dense(shape[0], shape[1], lengths, first.device))
