"""Slow formulas that the kernels are held against, written from the papers and sharing no code with the library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def group_element(matrices, matrix):
    """Index of a matrix among the group's matrices, found by distance (no Cayley table)."""
    distance = (matrices - matrix).abs().amax((1, 2))
    assert distance.min() < 1e-6
    return int(distance.argmin())


def relation_argument(matrices, relation, h, t, s):
    """u of one (h, t, s), by multiplying matrices."""
    m = matrices
    product = {
        "ge_vit": m[h].T @ m[t] @ m[s].T @ m[t],
        "lifted": m[t].T @ m[s],
        "relative": m[t].T @ m[s],
        "gsa": m[h].T @ m[t].T @ m[s],
    }[relation]
    return group_element(matrices, product)


def positions(spatial):
    """Position (x, y) or (x, y, z) of every pixel, flattened in the order of the tensor."""
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in spatial), indexing="ij")
    if len(spatial) == 2:
        row, column = axes
        return torch.stack([column, -row], -1).flatten(0, 1)
    z, row, column = axes
    return torch.stack([column, -row, z], -1).flatten(0, 2)


def attention_by_definition(query, key, value, rho, matrices, *, relation, inside, scale):
    """Group self-attention, one (image, head, pixel, h, t) at a time.

    query, key, value: (B, heads, C, T, *spatial); ``rho(offset, u)`` the encoding of an already rotated offset;
    ``relation`` None for lifting; ``inside(offset)`` whether an offset belongs to the neighbourhood.
    """
    batch, heads, _, elements, *spatial = query.shape
    place = positions(spatial)
    q, k, v = (x.flatten(4) for x in (query, key, value))
    out = torch.zeros(batch, heads, value.shape[2], len(matrices), len(place), dtype=value.dtype)
    rows = []
    for i, x_i in enumerate(place):
        keys = [j for j, x_j in enumerate(place) if inside(x_j - x_i)]
        for h in range(len(matrices)):
            total = 0
            for t in [h] if relation == "relative" else range(elements):
                encoding = torch.stack(
                    [
                        torch.stack(
                            [
                                rho(
                                    matrices[h].T @ (place[j] - x_i),
                                    0 if relation is None else relation_argument(matrices, relation, h, t, s),
                                )
                                for s in range(elements)
                            ]
                        )
                        for j in keys
                    ]
                )  # (keys, S, C)
                with_position = k[..., keys].permute(0, 1, 4, 3, 2) + encoding  # (B, heads, keys, S, C)
                score = scale * torch.einsum("bnc,bnksc->bnks", q[:, :, :, t, i], with_position)
                weight = score.flatten(2).softmax(-1).view(score.shape)
                total = total + torch.einsum("bnks,bncsk->bnc", weight, v[..., keys])
            rows.append((h, i, total))
    for h, i, total in rows:
        out[:, :, :, h, i] = total
    return out.unflatten(-1, spatial)


def attention_materialised(query, key, value, rho_space, rho_group, index, kernel_size, scale):
    """The direct formula on images with every tensor in memory, as published code computes it.

    Content scores are formed once and shared by all output elements, as in the published code; then every score of
    every (h, t, s, neighbour) exists at once, is normalised and multiplied with unfolded values. Shapes as
    tg_equiattn.functional.group_attention, local square windows only.
    """
    radius = kernel_size // 2

    def unfold(x):
        return F.pad(x, [radius] * 4).unfold(-2, kernel_size, 1).unfold(-2, kernel_size, 1).flatten(-2)

    query = scale * query
    height, width = query.shape[-2:]
    outside = (unfold(query.new_ones(height, width)) == 0)[:, :, None]
    content = torch.einsum("bnctyx,bncsyxd->bntyxsd", query, unfold(key)).masked_fill(outside, -math.inf)
    space = torch.einsum("bnctyx,hdc->bnhtyxd", query, rho_space)
    group = torch.einsum("bnctyx,uc->bntuyx", query, rho_group)
    element = torch.arange(index.shape[1], device=index.device)[None, :, None].expand_as(index)
    group = group[:, :, element, index].movedim(4, -1)  # (B, heads, H, T, y, x, S)
    score = (content[:, :, None] + space[..., None, :]).add_(group[..., None])
    weight = score.flatten(-2).softmax(-1).view(score.shape)  # (B, heads, H, T, y, x, S, D)
    return torch.einsum("bnhtyxsd,bncsyxd->bnchyx", weight, unfold(value))


def positive_features(x, projection):
    """exp(Wx - |x|^2 / 2), without the factor 1 / sqrt(m)."""
    return (x @ projection.T - x.square().sum(-1, keepdim=True) / 2).exp()


def offset_bias(attention, offset):
    """b of one offset, for every head, read from the parameters."""
    bias, k = attention.offset_bias, attention.max_distance
    if attention.offset == "mlp":
        return bias.last.weight @ F.silu(bias.first.weight @ (offset / k) + bias.first.bias) + bias.last.bias
    x, y = (int(o) + k - 1 for o in offset)
    return bias.table.view(-1, 2 * k - 1, 2 * k - 1)[:, x, y]


def performer_double_sum(attention, x, edge_index, offsets, batch):
    """A PerformerAttention from its parameters: every weight of every pair by the definition, one pair at a time."""
    heads, d, k = attention.heads, attention.head_channels, attention.max_distance
    content = heads - attention.position_heads
    projection, m = attention.features.projection, len(attention.features.projection)
    query = (x @ attention.query.weight.T).view(-1, heads, d)
    key = (x @ attention.key.weight.T).view(-1, content, d)
    value = (x @ attention.value.weight.T).view(-1, heads, d)
    phi_query, phi_key = positive_features(query / d**0.25, projection), positive_features(key / d**0.25, projection)
    edges = {(i, j): o for j, i, o in zip(*edge_index.tolist(), offsets, strict=True) if i != j}
    edges |= {(i, i): torch.zeros(2).to(x) for i in range(len(x))}
    if attention.position == "clipped":
        phi_table = positive_features(attention.distance_table / d**0.25, projection)
    out = []
    for i in range(len(x)):
        total, normaliser = 0, 0
        for j in range(len(x)):
            if batch[i] != batch[j]:
                continue
            weight = (phi_query[i, :content] * phi_key[j]).sum(-1) / m
            offset = edges.get((i, j))
            if attention.position == "window":
                weight = attention.far_bias.exp() * weight
                if offset is not None:
                    score = (query[i] * key[j]).sum(-1) / math.sqrt(d)
                    weight = weight + (score + offset_bias(attention, offset)).exp()
            elif attention.position == "clipped":
                distance = k if offset is None else min(int(offset.abs().sum()), k)
                weight = torch.cat([weight, (phi_query[i, content:] * phi_table[:, distance]).sum(-1)])
            total, normaliser = total + weight[:, None] * value[j], normaliser + weight
        out.append((total / normaliser[:, None]).flatten())
    return torch.stack(out) @ attention.out.weight.T + attention.out.bias
