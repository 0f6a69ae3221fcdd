"""Orders of the nodes of graphs: by their distance to the centroid, or as given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import checks
from .node_batch import NodeBatch
from .slots import inverse

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ORDERS = ("input", "radial")


@torch.no_grad()
def radial_order(
    pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch, scalars: Float[Tensor, "nodes channels"] | None = None
) -> Int[Tensor, " nodes"]:
    r"""Sort the nodes of each graph by their distance to its centroid, nearest first.

    Rotations, reflections, translations and permutations of the nodes do not change the order. Nodes whose distances
    agree within rounding are ordered by further invariants, one after the other:
    :math:`x_i \cdot \sum_j |x_j|^2 x_j`, :math:`x_i \cdot \sum_j x_j x_j^\top x_i`, and a fixed combination of the
    node's scalars. **Nodes that agree in all of them stay in the order of the input.** Nodes that a symmetry of the
    cloud exchanges agree in all of them, so relabelling the points of a ring or a lattice changes their order.

    "Within rounding" means that no two neighbors among the sorted distances differ by more than 1e-6 of the cloud's
    radius for float32, by more than 1e-12 for float64, or by more than the rounding of positions far from the origin;
    scalars agree within 1e-5 and 1e-10. In float32 clouds of many thousand nodes distances come that close by chance:
    give positions in float64 then (features may stay in float32). Derivatives do not include jumps of the order.

    Args:
        pos: positions of the nodes.
        node_batch: the graphs.
        scalars: invariant scalars of the nodes. The default, ``None``, means none.

    Returns:
        ``order``: node ``order[p]`` of the input comes at place p. Padding stays at the end of its graph.
    """
    raw = node_batch.zero_padding(pos.double())
    x = node_batch.centred(raw)
    rounding, square = torch.finfo(pos.dtype).eps, x.square().sum(1)
    radius, size = (node_batch.spread(_largest(y, node_batch)) for y in (square.sqrt(), raw.square().sum(1).sqrt()))
    skew = node_batch.spread(node_batch.mean(square[:, None] * x))
    spread = node_batch.spread(node_batch.mean(x[:, :, None] * x[:, None]))
    # each invariant with its scale; a relative error of radii is four times as large in their fourth power
    keys = [
        (square.sqrt(), radius),
        ((x * skew).sum(1), 4 * radius**4),
        (((spread * x[:, None]).sum(2) * x).sum(1), 4 * radius**4),
    ]
    tolerances = 3 * [(8 * rounding * size / radius).clamp(min=max(1e-12, 8 * rounding))]
    if scalars is not None and scalars.shape[1]:
        mixture = torch.arange(1, scalars.shape[1] + 1, device=x.device, dtype=x.dtype).sqrt()
        keys.append(
            (scalars.double() @ mixture, node_batch.spread(_largest(scalars.double().abs() @ mixture, node_batch)))
        )
        tolerances.append(torch.full_like(radius, max(1e-10, 80 * torch.finfo(scalars.dtype).eps)))
    group = 2 * node_batch.batch if node_batch.mask is None else 2 * node_batch.batch + (~node_batch.mask).long()
    for (key, size), tolerance in zip(keys, tolerances, strict=True):
        key = torch.where(size > 0, key / size, 0.0)
        order = key.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        apart = (key[order].diff() > tolerance[order][1:]) | (group[order].diff() != 0)
        group = torch.cat([apart.new_zeros(1), apart]).cumsum(0)[inverse(order)]
    return group.argsort(stable=True)  # ties in the order of the input, not in that of their rounded keys


def _largest(x: Float[Tensor, " nodes"], node_batch: NodeBatch) -> Float[Tensor, " graphs"]:
    """The maximum over each graph of numbers that are not negative."""
    return x.new_zeros(node_batch.count).scatter_reduce(0, node_batch.batch, x, "amax")


def check_order(order: Int[Tensor, " nodes"], node_batch: NodeBatch) -> None:
    """Raise ValueError unless order is a permutation of the nodes of every graph."""
    checks.tensor("order", order, torch.int64, [(node_batch.nodes,)], node_batch.sizes.device)
    _check_permutation(order, node_batch)


@checks.of_values
def _check_permutation(order: Tensor, node_batch: NodeBatch) -> None:
    whole = bool((order.sort().values == torch.arange(len(order))).all())
    if not whole or not bool((node_batch.batch[order] == node_batch.batch).all()):
        raise ValueError("order must be a permutation of the nodes within every graph, got other indices")
    if node_batch.mask is not None and not bool((node_batch.mask[order] == node_batch.mask).all()):
        raise ValueError("order must keep padding at the end of every graph, got padding before nodes")
