r"""The formulas of sums over plane waves, of groups of nodes whose features are all in memory.

A node has one feature for each direction d, frequency f, cosine or sine s, and component p of its key,

    phi_dfsp = (cos, sin)_s(kappa_df . x) k_fp,    kappa_df = omega_f u_d

and all that is computed is the form sum_j phi_j^T T v_j and its derivatives: with respect to T it is the table, with
respect to v the reading. Tensors of nodes are (G, n, ...) with the nodes innermost in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_formulas import Tensors


def plain_table(pos: Tensor, key: Tensor, value: Tensor, waves: Tensor) -> Tensor:
    """Of positions (G, n, 3), keys (G, n, F, P), values (G, n, V) and waves (G, D, F, 3), the tables
    (G, D, F, 2, P, V)."""
    features, *_ = _features(pos, key, waves)
    return (features.flatten(1, -2) @ value).unflatten(1, features.shape[1:-1])


def plain_reading(pos: Tensor, query: Tensor, waves: Tensor, table: Tensor) -> Tensor:
    """Of queries (G, n, F, P) and tables, the outputs (G, n, V)."""
    features, *_ = _features(pos, query, waves)
    return (table.flatten(1, -2).mT @ features.flatten(1, -2)).mT


def table_of_chunk(nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
    (pos, key, value), (waves,) = nodes, groups
    return (), (plain_table(pos, key, value, waves),)


def reading_of_chunk(nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
    (pos, query), (waves, table) = nodes, groups
    return (plain_reading(pos, query, waves, table),), ()


def table_gradient(moving: bool, nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
    """Gradients of positions, keys and values; of waves. Those of positions and waves are zero unless ``moving``."""
    (pos, key, value), (waves, table) = nodes, groups
    features, cosine, sine = _features(pos, key, waves)
    grad_value = (table.flatten(1, -2).mT @ features.flatten(1, -2)).mT
    grad_pos, grad_key, grad_waves = _chain(moving, pos, key, waves, cosine, sine, table, value)
    return (grad_pos, grad_key, grad_value), (grad_waves,)


def reading_gradient(moving: bool, nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
    """Gradients of positions and queries; of waves and tables."""
    (pos, query, grad_out), (waves, table) = nodes, groups
    features, cosine, sine = _features(pos, query, waves)
    grad_table = (features.flatten(1, -2) @ grad_out).view_as(table)
    grad_pos, grad_query, grad_waves = _chain(moving, pos, query, waves, cosine, sine, table, grad_out)
    return (grad_pos, grad_query), (grad_waves, grad_table)


def _features(pos: Tensor, key: Tensor, waves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features (G, D, F, 2, P, n), and cosines and sines (G, D, F, n)."""
    x, y, z = pos[:, None, None].unbind(-1)
    a, b, c = waves[..., None].unbind(-2)
    phase = torch.addcmul(torch.addcmul(a * x, b, y), c, z)  # not by a matrix product, which TF32 would round
    cosine, sine = phase.cos(), phase.sin()
    factors = torch.stack([cosine, sine], 3)
    return factors[:, :, :, :, None] * key.movedim(1, -1)[:, None, :, None], cosine, sine


def _chain(
    moving: bool, pos: Tensor, key: Tensor, waves: Tensor, cosine: Tensor, sine: Tensor, table: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of positions, keys and waves, through those of the features, T v."""
    grad = (table.flatten(1, -2) @ value.mT).unflatten(1, table.shape[1:-1])
    to_cosine, to_sine = grad[:, :, :, 0], grad[:, :, :, 1]  # (G, D, F, P, n)
    grad_key = (cosine[:, :, :, None] * to_cosine + sine[:, :, :, None] * to_sine).sum(1).movedim(-1, 1)
    if not moving:
        return torch.zeros_like(pos), grad_key, torch.zeros_like(waves)
    weight = key.movedim(1, -1)[:, None]
    grad_phase = (cosine * (to_sine * weight).sum(3) - sine * (to_cosine * weight).sum(3)).flatten(1, 2)
    return (
        (waves.flatten(1, 2).mT @ grad_phase).mT,
        grad_key,
        (grad_phase @ pos).view_as(waves),
    )
