r"""Vector self-attention by cross products, tile by tile, in O(N) memory.

Scores are lengths of cross products. |q x k|^2 = |q|^2 |k|^2 - (q.k)^2 is a scalar product of six features of q and six
of k. Sums over keys are of the matrices k v^T, since (q x k) x v = k (q.v) - q (k.v).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..operators import Plan, tile_numbers, tile_operator
from ..shapes import Float, Int
from ..tiles import WHOLE, Call, Shape, Tile
from ..torch_state import is_eager, is_whole, products_round

TILE_PAIRS = 1 << 19  # pairs of a tile on a CPU
_ROUNDING = 4  # squares below this number of roundings are zero: vectors are parallel


def vector_attention(
    q: Float[Tensor, "rows channels tokens 3"], k: Float[Tensor, "rows channels tokens 3"],
    v: Float[Tensor, "rows channels tokens 3"], lengths: Int[Tensor, " rows"] | None,
) -> Float[Tensor, "rows channels tokens 3"]:  # fmt: skip
    r"""Self-attention of vector sequences by cross products, each channel by itself.

    .. math::
        S_{ij} = \mathrm{softmax}_j\!\left(\tfrac{1}{\sqrt n} \|q_i \times k_j\|\right) (q_i \times k_j), \qquad
        u_i = \frac{1}{n} \sum_j S_{ij} \times v_j

    Here n is the sequence's own length. The output is computed as :math:`u_i = (T_i - \mathrm{tr}\,T_i)\, q_i / n` with
    :math:`T_i = \sum_j p_{ij}\, k_j v_j^\top` and the softmax p, in float32 for half precision; callers switch autocast
    off. If q and k are parallel to within the rounding of float32, scores are accurate to 1e-3 of :math:`|q||k|` only.

    Args:
        q: queries.
        k: keys.
        v: values.
        lengths: own length of each sequence. Tokens beyond it are not read, and are zero in the output. ``None`` means
            that all tokens are valid.

    Source: se3-hyena appendix B, Eq. 4-5. Its Code 2 computes something else: scores are divided by n / 2 instead of
    the root of n, and :math:`v_i` stands in place of :math:`v_j`, so that values do not mix.
    """
    rows, channels, length, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    invalid, bias = None, None
    if lengths is None:
        sizes = torch.full((rows,), length, dtype=dtype, device=q.device).clamp(min=1)
    else:
        invalid = (torch.arange(length, device=q.device) >= lengths[:, None])[:, None, :, None]
        bias = torch.zeros_like(invalid, dtype=dtype).masked_fill(invalid, torch.finfo(dtype).min / 2)
        bias = bias.expand(-1, channels, -1, -1).flatten(0, 1).mT
        q, k, v = (x.masked_fill(invalid, 0) for x in (q, k, v))
        sizes = lengths.to(dtype).clamp(min=1)
    root = sizes.rsqrt()[:, None, None, None]
    q, k, v = (x.to(dtype).flatten(0, 1) for x in (q.to(dtype) * root, k, v))
    tensors = *_features(q, k), (k[..., :, None] * v[..., None, :]).flatten(-2), bias
    mixed = _averages(None, *tensors) if is_whole(q) else averages_by_tiles(*tensors)[0]
    mixed = mixed.unflatten(-1, (3, 3))
    out = (mixed * q[..., None, :]).sum(-1) - mixed.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) * q
    out = out.unflatten(0, (rows, channels)) * root  # 1 / n, of which q has a root
    return out if invalid is None else out.masked_fill(invalid, 0)


def _features(
    q: Float[Tensor, "groups tokens 3"], k: Float[Tensor, "groups tokens 3"]
) -> tuple[Float[Tensor, "groups tokens 6"], Float[Tensor, "groups tokens 6"]]:
    """Features of queries and keys, whose scalar products are |q x k|^2."""
    (x, y, z), (a, b, c) = q.unbind(-1), k.unbind(-1)
    aa, bb, cc = a * a, b * b, c * c
    rounding = _ROUNDING * torch.finfo(q.dtype).eps * (aa + bb + cc)  # without it, parallel vectors would have slopes
    squares = bb + cc - rounding, cc + aa - rounding, aa + bb - rounding
    of_keys = torch.stack([*squares, -2 * b * c, -2 * c * a, -2 * a * b], -1)
    return torch.stack([x * x, y * y, z * z, y * z, z * x, x * y], -1), of_keys


def _tiles(q: Float[Tensor, "groups tokens 3"], ragged: bool) -> list[Tile]:
    """Some queries of some groups, with all keys of these groups."""
    groups, length = q.shape[:2]
    budget = tile_numbers(q.device, TILE_PAIRS, 8)
    step = max(1, min(length, budget // length))
    some = max(1, min(groups, budget // (length * step)))
    tiles = []
    for g, n in itertools.product(range(0, groups, some), range(0, length, step)):
        group = slice(g, g + some)
        rows = group, slice(n, n + step)
        tiles.append(Tile(None, (rows, group, group, group if ragged else WHOLE), (rows,)))
    return tiles


def _plan(of_queries: Tensor, of_keys: Tensor, values: Tensor, bias: Tensor | None) -> Plan:
    tiles = tuple(_tiles(of_queries, bias is not None))
    shape = Shape((*of_queries.shape[:2], values.shape[2]), True)
    return Call(_averages, tiles, (shape,), (True, False, False, False)), (of_queries, of_keys, values, bias)


def _averages(
    settings: None, of_queries: Float[Tensor, "groups some 6"], of_keys: Float[Tensor, "groups tokens 6"],
    values: Float[Tensor, "groups tokens 9"], bias: Float[Tensor, "groups 1 tokens"] | None,
) -> Float[Tensor, "groups some 9"]:  # fmt: skip
    """sum_j softmax_j(|q_i x k_j| + bias_j) values_j. The derivative of a score of zero is zero."""
    square = _exact_product(of_queries, of_keys)
    memory = square if is_eager() and not torch.is_grad_enabled() else None  # fresh memory takes half of the time
    score = torch.clamp(square, min=torch.finfo(values.dtype).tiny ** 0.5, out=memory)
    score = torch.sqrt(score, out=memory)
    score = score if bias is None else torch.add(score, bias, out=memory)
    weight = torch.softmax(score, -1, out=memory)
    return _weighted_sum(weight, values)


# Terms of |q x k|^2 cancel if vectors are nearly parallel, so rounded factors would give wrong scores. Where matrix
# products may round their factors (TF32, bfloat16 on a CPU), these products are sums of elementwise ones.


def _exact_product(a: Float[Tensor, "groups n width"], b: Float[Tensor, "groups m width"]) -> Tensor:
    """a b^T with exact factors, for a small width."""
    if not products_round(a):
        return a @ b.mT
    (first, second), *rest = zip(a[..., None, :].unbind(-1), b[..., None, :, :].unbind(-1), strict=True)
    out = first * second
    for x, y in rest:
        out = torch.addcmul(out, x, y)
    return out


def _weighted_sum(weight: Float[Tensor, "groups n m"], values: Float[Tensor, "groups m width"]) -> Tensor:
    """weight times values, with exact factors, for a small width."""
    if not products_round(weight):
        return weight @ values
    return torch.stack([(weight * x[..., None, :]).sum(-1) for x in values.unbind(-1)], -1)


def _outputs(of_queries: Tensor, of_keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    return (values.new_empty(*of_queries.shape[:2], values.shape[2]),)


averages_by_tiles = tile_operator(
    "tg_equiattn::vector_attention", "Tensor of_queries, Tensor of_keys, Tensor values, Tensor? bias", _plan, _outputs,
    num_gradients=3, num_results=1,
)  # fmt: skip
