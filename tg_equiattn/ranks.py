"""Softmax averages over several sets of keys, and graphs whose nodes are shared among the processes of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def merge_attentions(
    outs: Float[Tensor, "sets ..."], lses: Float[Tensor, "sets ..."]
) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
    r"""Merge softmax averages of disjoint sets of keys, with the log-sum-exps of their scores, which broadcast.

    .. math::
        \mathrm{lse} = \log \sum_n e^{\mathrm{lse}_n}, \qquad
        \mathrm{out} = \sum_n e^{\mathrm{lse}_n - \mathrm{lse}}\; \mathrm{out}_n
    """
    top = lses.detach().amax(0)
    weights = (lses - top).exp()
    total = weights.sum(0)
    return (weights * outs).sum(0) / total, total.log() + top


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
        self, sums: Float[Tensor, "*any m e"], top: Float[Tensor, "*any m 1"]
    ) -> tuple[Float[Tensor, "*any m e"], Float[Tensor, "*any m 1"]]:
        """From sums of exp(score - top) over the keys of each rank, those over all keys, by one all-reduce."""
        most = self.largest(top)
        return self.sum(sums * (top - most).exp()), most

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
