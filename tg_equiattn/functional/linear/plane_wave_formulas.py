r"""The formulas of sums over plane waves, of groups of nodes whose features are all in memory.

A node has one feature for each direction d, frequency f, cosine or sine s, and component p of its key,

    phi_dfsp = (cos, sin)_s(kappa_df . x) k_fp,    kappa_df = omega_f u_d

and all that is computed is the form sum_j phi_j^T T v_j and its derivatives: with respect to T it is the table, with
respect to v the reading. Tensors of nodes are (G, n, ...) with the nodes innermost in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    phase = _phase(pos, waves)
    cosine, sine = phase.cos(), phase.sin()
    return _outer(cosine, sine, key.movedim(1, -1)[:, None]), cosine, sine


def _outer(cosine: Tensor, sine: Tensor, key: Tensor) -> Tensor:
    """Features (G, D, F, 2, P, n) of factors (G, D, F, n) and keys (G, 1, F, P, n)."""
    return torch.stack([cosine, sine], 3)[:, :, :, :, None] * key[:, :, :, None]


def _phase(pos: Tensor, waves: Tensor) -> Tensor:
    """Angles (G, D, F, n); not by a matrix product, which TF32 would round."""
    x, y, z = pos[:, None, None].unbind(-1)
    a, b, c = waves[..., None].unbind(-2)
    return torch.addcmul(torch.addcmul(a * x, b, y), c, z)


def _along(waves: Tensor, grad_phase: Tensor) -> Tensor:
    """To positions (G, n, 3)."""
    return (waves.flatten(1, 2).mT @ grad_phase.flatten(1, 2)).mT


def _across(grad_phase: Tensor, pos: Tensor, waves: Tensor) -> Tensor:
    """To waves (G, D, F, 3)."""
    return (grad_phase.flatten(1, 2) @ pos).view_as(waves)


def _over_directions(cosine: Tensor, to_cosine: Tensor, sine: Tensor, to_sine: Tensor) -> Tensor:
    """To keys (G, n, F, P), of factors (G, D, F, n) and gradients (G, D, F, P, n)."""
    return (cosine[:, :, :, None] * to_cosine + sine[:, :, :, None] * to_sine).sum(1).movedim(-1, 1)


def _chain(
    moving: bool, pos: Tensor, key: Tensor, waves: Tensor, cosine: Tensor, sine: Tensor, table: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of positions, keys and waves, through those of the features, T v."""
    grad = (table.flatten(1, -2) @ value.mT).unflatten(1, table.shape[1:-1])
    to_cosine, to_sine = grad[:, :, :, 0], grad[:, :, :, 1]  # (G, D, F, P, n)
    grad_key = _over_directions(cosine, to_cosine, sine, to_sine)
    if not moving:
        return torch.zeros_like(pos), grad_key, torch.zeros_like(waves)
    weight = key.movedim(1, -1)[:, None]
    grad_phase = cosine * (to_sine * weight).sum(3) - sine * (to_cosine * weight).sum(3)
    return _along(waves, grad_phase), grad_key, _across(grad_phase, pos, waves)


def second_gradient(
    nodes: Tensors, groups: Tensors, to_nodes: Sequence[Tensor | None], to_groups: Sequence[Tensor | None]
) -> tuple[Tensors, Tensors]:
    """Gradients of positions, keys and values, and of waves and tables, through :func:`table_gradient` and
    :func:`reading_gradient`.

    Both are derivatives of the form phi^T T v, so what is differentiated here is its derivative in the direction of
    their cotangents: with phi' that of the features, phi'^T T v + phi^T T v' + phi^T T' v.

    Args:
        nodes, groups: positions, keys, values; waves, tables.
        to_nodes, to_groups: their cotangents, None for zeros.
    """
    (pos, key, value), (waves, table) = nodes, groups
    (to_pos, to_key, to_value), (to_waves, to_table) = to_nodes, to_groups
    phase = _phase(pos, waves)
    cosine, sine, rows, weight = phase.cos(), phase.sin(), table.flatten(1, -2), key.movedim(1, -1)[:, None]
    grad_pos, grad_key, grad_value = (torch.zeros_like(x) for x in (pos, key, value))
    grad_waves, grad_table, grad_phase = (torch.zeros_like(x) for x in (waves, table, phase))
    sides = []  # what features are multiplied with in the terms without phi'
    if to_value is not None or to_table is not None:
        features = _outer(cosine, sine, weight).flatten(1, -2)
    if to_value is not None:
        sides.append((rows @ to_value.mT).unflatten(1, table.shape[1:-1]))
        grad_table = grad_table + (features @ to_value).view_as(table)
    if to_table is not None:
        other = to_table.flatten(1, -2)
        sides.append((other @ value.mT).unflatten(1, table.shape[1:-1]))
        grad_value = grad_value + (other.mT @ features).mT
    for side in sides:
        c, s = side[:, :, :, 0], side[:, :, :, 1]
        grad_key = grad_key + _over_directions(cosine, c, sine, s)
        grad_phase = grad_phase + cosine * (s * weight).sum(3) - sine * (c * weight).sum(3)
    if to_pos is None and to_key is None and to_waves is None:
        return (grad_pos + _along(waves, grad_phase), grad_key, grad_value), (
            grad_waves + _across(grad_phase, pos, waves), grad_table,
        )  # fmt: skip
    turn = torch.zeros_like(cosine)  # of the phase, along the cotangents
    turn = turn if to_pos is None else turn + _phase(to_pos, waves)
    turn = turn if to_waves is None else turn + _phase(pos, to_waves)
    moved = _outer(-sine * turn, cosine * turn, weight)
    if to_key is not None:
        along = to_key.movedim(1, -1)[:, None]
        moved = moved + _outer(cosine, sine, along)
    grad_table = grad_table + (moved.flatten(1, -2) @ value).view_as(table)
    grad_value = grad_value + (rows.mT @ moved.flatten(1, -2)).mT
    grad = (rows @ value.mT).unflatten(1, table.shape[1:-1])
    c, s = grad[:, :, :, 0], grad[:, :, :, 1]
    by_cosine, by_sine = (c * weight).sum(3), (s * weight).sum(3)
    grad_key = grad_key + _over_directions(-sine * turn, c, cosine * turn, s)
    grad_phase = grad_phase - turn * (cosine * by_cosine + sine * by_sine)
    if to_key is not None:
        grad_phase = grad_phase + cosine * (s * along).sum(3) - sine * (c * along).sum(3)
    grad_turn = cosine * by_sine - sine * by_cosine
    grad_pos, grad_waves = grad_pos + _along(waves, grad_phase), grad_waves + _across(grad_phase, pos, waves)
    if to_waves is not None:
        grad_pos = grad_pos + _along(to_waves, grad_turn)
    if to_pos is not None:
        grad_waves = grad_waves + _across(grad_turn, to_pos, waves)
    return (grad_pos, grad_key, grad_value), (grad_waves, grad_table)
