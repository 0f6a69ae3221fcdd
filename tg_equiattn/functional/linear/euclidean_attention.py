"""Euclidean fast attention: attention of point clouds in linear time, by plane waves averaged over directions."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ... import checks
from ...encodings.directions import check_degree
from ...precision import full_precision
from ...sequences import Sequences
from .euclidean_methods import METHODS, EuclideanMethod, Product

BACKENDS = ("auto", "torch", "plain")
REDUCTIONS = ("sum", "mean")


def euclidean_fast_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos: Tensor,
    frequencies: Tensor,
    rule: tuple[Tensor, Tensor] | None = None,
    *,
    lmax: int = 0,
    product: Product | None = None,
    lengths: Tensor | None = None,
    batch: Tensor | None = None,
    batch_size: int | None = None,
    max_num_nodes: int | None = None,
    reduce: str = "sum",
    method: str = "auto",
    backend: str = "auto",
) -> Tensor:
    r"""Attention of point clouds that depends on distances and directions, in time linear in the number of points.

    Queries and keys hold pairs of channels, and :math:`\phi_u(x, z)` turns pair c of z by the angle
    :math:`\omega_c\, u \cdot x`. With :math:`u_m, w_m` a rule for means over the sphere and :math:`\otimes` a product
    of values with spherical harmonics Y up to degree ``lmax``,

    .. math:: \mathrm{out}_i = \frac{1}{\sqrt d} \sum_m w_m\, \phi_{u_m}(x_i, q_i)^\top
        \Big[\sum_j \phi_{u_m}(x_j, k_j)\, v_j^\top \Big] \otimes Y(u_m)

    with d the channels of a query. The bracket is a table, one a cloud, and the product acts on it. As the rule grows
    this tends to a sum over all pairs, with :math:`r = x_i - x_j` and spherical Bessel functions
    (:math:`j_0(z) = \sin z / z`):

    .. math:: \mathrm{out}_i = \frac{1}{\sqrt d} \sum_j \sum_c v_j \otimes \sum_l \begin{cases}
        (-1)^{l/2}\, \langle q_i, k_j \rangle_c\, j_l(\omega_c |r|)\, Y_l(r) & l \text{ even} \\
        (-1)^{(l-1)/2}\, (q^1_i k^2_j - q^2_i k^1_j)_c\, j_l(\omega_c |r|)\, Y_l(r) & l \text{ odd} \end{cases}

    which ``method="pairs"`` computes, exactly equivariant, in blocks. There is no order and no cutoff: the output is
    smooth in positions and has derivatives of any order. Sums grow with the number of points: see ``reduce``.

    Args:
        query, key: dense ``(B, N, heads, F, 2, K)``, F frequencies with pairs of K components each, contracted (a
            vector's three, say); or ragged ``(T, heads, F, 2, K)`` with ``batch``.
        value: ``(B, N, heads, V)`` or ``(T, heads, V)``.
        pos: ``(B, N, 3)`` or ``(T, 3)``; enter relative to the mean of their cloud. Give large coordinates in float64,
            whatever the features are.
        frequencies: ``(F,)``, or ``(heads, F)``, in radians per unit of length.
        rule: directions ``(D, 3)``, one of each pair :math:`\pm u`, and their weights ``(D,)``, as
            :func:`tg_equiattn.encodings.direction_rule` makes them. ``None`` means pairs.
        lmax: the highest degree of harmonics.
        product: a function of features ``(..., heads, V)``, harmonics of one degree ``(..., 1, 2 l + 1)``
            (:func:`tg_equiattn.encodings.solid_harmonics`), broadcast, and that degree l, to ``(..., heads, E)``,
            linear in both; its values for all degrees are added up. ``None`` means every product apart, E = V (lmax +
            1)².
        lengths: dense only, int64 ``(B,)``, the own length of each cloud; what lies beyond is never read, and zero.
        batch: ragged only, sorted int64 ``(T,)``, the cloud of each point; ``None`` means one.
        batch_size, max_num_nodes: number of ragged clouds and a bound of their sizes, read from ``batch`` where not
            given, which torch.compile cannot.
        reduce: ``"sum"``, or ``"mean"``, divided by the number of points of the cloud.
        method: ``"directions"``, ``"pairs"``, or ``"auto"``: pairs for clouds of fewer than 64 points (counted
            with padding, where ``lengths`` or ``max_num_nodes`` say how much there is).
        backend: ``"plain"`` for sums with all features in memory, as operations of torch; ``"auto"`` and ``"torch"``
            for the streamed operators.

    Returns:
        ``(B, N, heads, E)`` or ``(T, heads, E)``, in float32 where values have half precision.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Frank, Chmiela, Müller and Unke, Euclidean Fast Attention (arXiv 2412.08541).

    Example:
        >>> import torch
        >>> from tg_equiattn.encodings import direction_rule
        >>> q, k, v = torch.randn(3, 2, 100, 1, 16).double()
        >>> q, k = (x.view(2, 100, 1, 8, 2, 1) for x in (q, k))
        >>> pos, frequencies = torch.rand(2, 100, 3).double(), torch.linspace(0, 3, 8).double()
        >>> out = euclidean_fast_attention(q, k, v, pos, frequencies, direction_rule(3 * 3**0.5))
        >>> exact = euclidean_fast_attention(q, k, v, pos, frequencies, method="pairs")
        >>> bool((out - exact).abs().max() < 1e-5 * exact.abs().max())
        True
    """
    check_options(reduce, method, backend)
    check_degree(lmax=lmax)
    dense = isinstance(query, Tensor) and query.ndim == 6
    checks.alike(6 if dense else 5, query=query, key=key)
    points = query.shape[:-4]
    heads, count, pair = query.shape[-4:-1]
    if pair != 2:
        raise ValueError(f"query must be ([B,] N, heads, F, 2, K), with pairs of channels, got {tuple(query.shape)}")
    if not isinstance(value, Tensor) or value.ndim != len(points) + 2 or value.shape[:-1] != query.shape[:-3]:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"value must be {(*points, heads)} and V, got {came}")
    checks.same_kind(value, query, "value")
    checks.half_precision(value=value)
    pos = checks.positions(pos, (*points, 3), query, "attention depends on them")
    _check_frequencies(frequencies, heads, count, query)
    if rule is None and method == "directions":
        raise ValueError("rule must be given with method='directions' (encodings.direction_rule), got None")
    _check_rule(rule, query)
    if dense:
        if batch is not None:
            raise ValueError("batch must be None where query is (B, N, ...): use lengths")
        checks.lengths(lengths, points[0], points[1], query.device)
        sequences = Sequences.dense(points[0], points[1], lengths, query.device)
        query, key, value, pos = (x.flatten(0, 1) for x in (query, key, value, pos))
    else:
        if lengths is not None:
            raise ValueError("lengths must be None where query is flat: use batch")
        sequences = Sequences.from_batch(query, batch, batch_size, max_num_nodes)
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key, value = (sequences.zero_padding(x.movedim(0, -1).to(dtype)) for x in (query, key, value))
        places = sequences.zero_padding((pos if pos.is_floating_point() else pos.double()).T)
        places = sequences.centred(places.to(torch.promote_types(places.dtype, dtype))).to(dtype)
        frequencies = frequencies.to(dtype).view(-1, count)
        rule = None if rule is None else (rule[0].to(dtype), rule[1].to(dtype))
        chosen = EuclideanMethod(product or functools.partial(every_product, lmax), lmax, rule, method, backend)
        out = attention_in_sequences(chosen, places, query, key, value, frequencies, sequences, reduce)
    return out.movedim(-1, 0).unflatten(0, points)


def attention_in_sequences(
    method: EuclideanMethod,
    pos: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frequencies: Tensor,
    sequences: Sequences,
    reduce: str = "sum",
) -> Tensor:
    """:func:`euclidean_fast_attention`, unchecked: positions (3, T) near the origin, queries and keys (H, F, 2, K, T),
    values (H, V, T), all of one dtype, frequencies (H or 1, F), to (H, E, T)."""
    if sequences.are_empty:
        return method.of_nothing(value)
    pos = sequences.zero_padding(pos)

    def kernel(pos: Tensor, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
        return method.attend(pos, query, key, value, frequencies)

    out = sequences.zero_padding(sequences.mix(kernel, pos, query, key, value))
    if reduce == "mean":
        out = out / sequences.sizes.clamp(min=1).to(out.dtype)[sequences.batch]
    return out


def check_options(reduce: str, method: str, backend: str) -> None:
    """ValueError for unknown names."""
    checks.choice("reduce", reduce, REDUCTIONS)
    checks.choice("method", method, METHODS)
    checks.choice("backend", backend, BACKENDS)


def _check_frequencies(frequencies: Tensor, heads: int, count: int, query: Tensor) -> None:
    if not isinstance(frequencies, Tensor) or tuple(frequencies.shape) not in ((count,), (heads, count)):
        came = tuple(frequencies.shape) if isinstance(frequencies, Tensor) else type(frequencies).__name__
        raise ValueError(f"frequencies must be ({count},) or ({heads}, {count}), got {came}")
    if frequencies.device != query.device or not frequencies.is_floating_point():
        raise ValueError(
            f"frequencies must be floating point on {query.device} as query is, got {frequencies.dtype} on "
            f"{frequencies.device}"
        )


def _check_rule(rule: tuple[Tensor, Tensor] | None, query: Tensor) -> None:
    if rule is None:
        return
    directions, weights = rule
    if directions.ndim != 2 or directions.shape[1] != 3 or weights.shape != directions.shape[:1]:
        raise ValueError(
            f"rule must be directions (D, 3) and weights (D,), got {tuple(directions.shape)} and {tuple(weights.shape)}"
        )
    if directions.device != query.device:
        raise ValueError(f"rule must be on {query.device} as query is, got {directions.device}")


def every_product(lmax: int, features: Tensor, harmonics: Tensor, degree: int) -> Tensor:
    products = features[..., None] * harmonics[..., None, :]
    return torch.nn.functional.pad(products, (degree**2, (lmax + 1) ** 2 - (degree + 1) ** 2)).flatten(-2)
