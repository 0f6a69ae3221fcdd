"""Softmax averages over several sets of keys, and graphs whose nodes are shared among the processes of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def merge_attentions(
    outs: Tensor,
    lses: Tensor,
    largest: Callable[[Tensor], Tensor] = lambda lses: lses.amax(0),
    sums: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda w, outs: (w.sum(0), (w * outs).sum(0)),
) -> tuple[Tensor, Tensor]:
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


class Ranks:
    """The processes of a group that share every graph of a batch.

    Sums are all-reduces of the group, also in backward, so every rank has to call backward. Gradients are those of the
    sum of the losses of all ranks.
    """

    def __init__(self, process_group: Any) -> None:
        if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
            wanted = "a torch.distributed.ProcessGroup that this process is in"
            raise ValueError(f"process_group must be {wanted}, got {type(process_group).__name__}")
        self.process_group = process_group

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks of x, which has one shape on all of them."""
        from torch.distributed.nn.functional import all_reduce

        return all_reduce(x.contiguous(), group=self.process_group)

    @torch.no_grad()
    def largest(self, x: Tensor) -> Tensor:
        """The largest x of all ranks."""
        x = x.detach().clone()
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.process_group)
        return x

    def merge(
        self, content: Float[Tensor, "*batch m e"], lse: Float[Tensor, "*batch m"]
    ) -> tuple[Float[Tensor, "*batch m e"], Float[Tensor, "*batch m"]]:
        """Merge softmax averages and log-sum-exps over the keys of each rank into those over all keys."""

        def sums(weight: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
            both = self.sum(torch.cat([weight * content, weight], -1))  # one all-reduce
            return both[..., -1:], both[..., :-1]

        content, lse = merge_attentions(content, lse[..., None], self.largest, sums)
        return content, lse[..., 0]

    def check_graphs(self, count: int, device: torch.device) -> None:
        """Raise ValueError unless all ranks have the same number of graphs."""
        most, fewest = self.largest(torch.tensor([count, -count], device=device)).tolist()
        if most != -fewest:
            raise ValueError(
                f"batch_size must be the same on all ranks of process_group, got {count} here, and {-fewest} to {most}"
            )

    def __deepcopy__(self, memo: dict) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a module with a process_group cannot be pickled: set its process_group to None first")


class Shared:
    """A module that may have the nodes of every graph shared among processes."""

    ranks: Ranks | None = None

    def why_not_shared(self) -> str | None:
        """The setting of the module that rules out shared graphs; ``None`` if there is none."""

    @property
    def process_group(self) -> Any:
        """The :mod:`torch.distributed` group whose processes share the nodes of every graph; ``None`` without one."""
        return None if self.ranks is None else self.ranks.process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        if process_group is not None and (reason := self.why_not_shared()):
            raise ValueError(f"process_group must be None with {reason}, got {type(process_group).__name__}")
        self.ranks = None if process_group is None else Ranks(process_group)
