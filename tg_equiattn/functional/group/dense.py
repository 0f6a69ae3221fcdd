"""Group attention over all pixels, by matrix products; see :mod:`.definition` for the sizes.

Scores are formed in chunks of images, heads and query pixels that fit in a budget, and recomputed in backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import full_precision
from ..backend import tile_numbers
from ..chunks import checkpointed, is_whole
from .definition import chunks, runs
from .elements import Elements
from .masks import MASKED_SCORE
from .shifts import offsets_of_pairs

# Number of scores in a chunk on a CPU.
_CHUNK = 1 << 22


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor | None, offset_encoding: Tensor | None = None,
    element_encoding: Tensor | None = None, space_bias: Tensor | None = None, group_bias: Tensor | None = None, *,
    key_mask: Tensor | None = None, dropout: float = 0.0, chunk: int = -1,
) -> Tensor:  # fmt: skip
    """Attention of all query pixels to all key pixels: query (B, e, C, Q, *spatial), key (B, e, C, K, *key spatial),
    value (B, e, Cv, K, *key spatial) -> (B, e, Cv, H, *spatial).

    Queries are already multiplied by the scale c. Encodings and biases have the shapes of :func:`.group_attention`, or
    are None. If nothing depends on offsets, keys may come from an image of another size. ``key_mask`` (B or 1, *key
    spatial) is true at valid keys. ``chunk`` is the largest number of scores in memory at once; -1 means the default.
    """
    spatial, outputs = query.shape[4:], query.shape[3] if index is None else len(index)
    elements = Elements.of(index, query, outputs if offset_encoding is None else len(offset_encoding))
    whole = is_whole(query)
    pairs = None if offset_encoding is None and space_bias is None else offsets_of_pairs(spatial, query.device)
    with full_precision(query.device):
        query, key, value = (x.flatten(4) for x in (query, key, value))
        key_mask = None if key_mask is None else key_mask.flatten(1)
        attend = functools.partial(_attend, elements, dropout)
        (batch, heads), pixels = query.shape[:2], query.shape[4]
        if whole:
            out = attend(query, key, value, offset_encoding, element_encoding, space_bias, group_bias, pairs, key_mask)
            return out.unflatten(-1, spatial)
        each = elements.outputs * elements.queries * elements.keys * key.shape[4]
        budget = tile_numbers(query.device, _CHUNK, 6) if chunk < 0 else chunk
        parts = []  # one entry a chunk: whole images, or some heads of one image
        for images, some, rows in chunks(batch, heads, pixels, each, budget):
            biases = (None if x is None else x[some] for x in (space_bias, group_bias))
            tables = offset_encoding, element_encoding, *biases
            mask = key_mask if key_mask is None or len(key_mask) == 1 else key_mask[images]
            found = []
            for start, count in runs(pixels, rows):
                given: tuple[Any, ...] = (
                    query[images, some].narrow(-1, start, count), key[images, some], value[images, some], *tables,
                    None if pairs is None else pairs.narrow(0, start, count), mask,
                )  # fmt: skip
                found.append(checkpointed(attend, *given, preserve_rng_state=True))
            parts.append(torch.cat(found, -1).flatten(0, 1))
        out = torch.cat(parts)
        return out.unflatten(0, (batch, heads)).unflatten(-1, spatial)


def _attend(
    elements: Elements, dropout: float, query: Tensor, key: Tensor, value: Tensor, offset_encoding: Tensor | None,
    element_encoding: Tensor | None, space_bias: Tensor | None, group_bias: Tensor | None, pairs: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of n query pixels to N key pixels: (b, e, Cv, H, n)."""
    keys, pixels = elements.of_keys(key).transpose(2, 3).flatten(4), (elements.keys, key.shape[4])
    values = elements.of_keys(value).transpose(2, 3).flatten(4)  # (b, e, H or 1, Cv, S N)
    rho = None if offset_encoding is None else offset_encoding[:, pairs]  # (H, n, N, C) or (H, n, N, U, C)
    fixed = [] if space_bias is None else [space_bias[..., pairs].unsqueeze(3)]  # terms that are the same for every t
    if key_mask is not None:
        penalty = torch.zeros_like(key_mask, dtype=query.dtype).masked_fill(~key_mask, MASKED_SCORE)
        fixed.append(penalty[:, None, None, None, None])
    total: Tensor | None = None
    for t in range(elements.queries):
        q = elements.of_query(query, t).permute(0, 1, 3, 4, 2)  # (b, e, H or 1, n, C)
        of_pixels, of_elements = [], []  # terms of scores (b, e, H or 1, n, S, N) without axis S, or N
        if rho is not None:
            every = q.expand(-1, -1, elements.outputs, -1, -1)
            if rho.ndim == 4:
                of_pixels.append(torch.einsum("behnc,hnmc->behnm", every, rho).contiguous().unsqueeze(4))
            else:
                position = torch.einsum("behnc,hnmuc->behunm", every, rho)
                of_pixels.append(elements.by_key(position, t, 2).transpose(3, 4))
        of_pixels += fixed
        if element_encoding is not None:
            argument = torch.matmul(element_encoding, q.mT)  # (b, e, H or 1, U, n)
            of_elements.append(elements.by_key(argument, t, 2).transpose(3, 4).unsqueeze(-1))
        if group_bias is not None:
            of_elements.append(elements.by_key(group_bias[:, None], t, 1)[:, :, None, :, None])
        scores = _with_terms(q, keys, pixels, [functools.reduce(torch.add, x) for x in (of_pixels, of_elements) if x])
        weight = scores.softmax(-1)
        total = weight if total is None else total + weight
    weight = weight if total is None else total
    weight = weight.expand(-1, -1, elements.outputs, -1, -1)
    return _product(F.dropout(weight, dropout) if dropout else weight, values.mT).movedim(-1, 2)


def _with_terms(q: Tensor, keys: Tensor, pixels: tuple[int, int], terms: list[Tensor]) -> Tensor:
    """Products of queries and keys plus terms that broadcast to (b, e, H, n, S, N): scores (b, e, H, n, S N).

    New memory for large tensors takes a CPU longer than sums, so the matrix product is added to the sum of the terms.
    """
    if not terms:
        return _product(q, keys)
    added = functools.reduce(torch.add, terms)
    if added.shape[2] > q.shape[2]:
        return (_product(q, keys).unflatten(-1, pixels) + added).flatten(4)
    return _product(q, keys, added.expand(*q.shape[:4], *pixels))


def _product(x: Tensor, y: Tensor, added: Tensor | None = None) -> Tensor:
    """Products (b, e, H, n, c) of x (b, e, H, n, a) and y (b, e, H or 1, a, c), as one large product if all outputs
    share y; they are added to a tensor of as many numbers, if there is one."""
    left = x.flatten(2, 3).flatten(0, 1) if y.shape[2] == 1 else x.flatten(0, 2)
    right = y.flatten(0, 2)
    out = torch.bmm(left, right) if added is None else torch.baddbmm(added.reshape(*left.shape[:2], -1), left, right)
    return out.view(*x.shape[:4], -1)
