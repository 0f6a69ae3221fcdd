"""Softmax averages over several sets of keys, merged into those over all keys."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def _largest(lses: Tensor) -> Tensor:
    return lses.amax(0)


def _sums(weights: Tensor, outs: Tensor) -> tuple[Tensor, Tensor]:
    return weights.sum(0), (weights * outs).sum(0)


def merge_attentions(
    outs: Tensor, lses: Tensor, largest: Callable[[Tensor], Tensor] = _largest,
    sums: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _sums,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Merge softmax averages of disjoint sets of keys.

    .. math::
        \mathrm{lse} = \log \sum_n e^{\mathrm{lse}_n}, \qquad
        \mathrm{out} = \sum_n e^{\mathrm{lse}_n - \mathrm{lse}}\; \mathrm{out}_n

    Args:
        outs: averages of each set n, by default along the first axis.
        lses: log-sum-exps of the scores of each set, which broadcast with ``outs``.
        largest: maximum of log-sum-exps over sets; it broadcasts with ``lses`` and with the results.
        sums: sums over sets of weights, and of weights times averages.
    """
    top = largest(lses.detach())
    total, out = sums((lses - top).exp(), outs)
    return out / total, total.log() + top
