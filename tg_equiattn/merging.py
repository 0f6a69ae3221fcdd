"""Merge softmax averages over several sets of keys into averages over all keys."""

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
        lses: log-sum-exps of the scores of each set. They broadcast with ``outs``.
        largest: function of log-sum-exps that returns their maximum over sets, which broadcasts with ``lses`` and with
            the results. The default takes it over the first axis.
        sums: function of weights and averages that returns the sums over sets of weights, and of weights times
            averages. The default sums over the first axis.

    Returns:
        The averages over all keys and their log-sum-exps, with the axes that ``sums`` and ``largest`` leave.
    """
    top = largest(lses.detach())
    total, out = sums((lses - top).exp(), outs)
    return out / total, total.log() + top
