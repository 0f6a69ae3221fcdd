"""One step of Clifford message passing along the edges of a graph, on tokens kept as (rows, T)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..children import reset_children
from .clifford import GradedMLP
from .grades import POSITION, Grades, join_channels
from .options import OperatorOptions


class Edges(NamedTuple):
    """Edges from source to target tokens, (2, E), with scalars (edge_channels, E)."""

    pairs: Tensor
    scalars: Tensor


class LocalContext(nn.Module):
    r"""One step of Clifford message passing.

    .. math:: x_i \leftarrow x_i + \psi\Big(x_i, \tfrac{1}{|N(i)|} \sum_{j \in N(i)} \phi(x_j - x_i, e_{ij})\Big)

    with Clifford MLPs, positions among the vectors of x, and scalars e of the edges. Tokens without edges get a mean of
    zero.

    Source: the refinement of the operator's authors in their Geometric Hyena.
    """

    def __init__(self, grades: Grades, channels: int, options: OperatorOptions) -> None:
        super().__init__()
        self.grades, self.edge_grades, self.messages = grades, Grades(options.edge_channels), Grades(*[channels] * 4)
        inside = grades.plus(POSITION)
        self.message = GradedMLP(inside.plus(self.edge_grades), self.messages, channels, options)
        self.update = GradedMLP(inside.plus(self.messages), grades, channels, options)

    def forward(self, x: Tensor, pos: Tensor, edges: Edges) -> Tensor:
        tokens = x.shape[-1]
        source, target = edges.pairs
        features = torch.cat([x, pos]).T.contiguous()
        sums = x.new_zeros(tokens, self.messages.dim)
        step = len(source)
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            step = 16 * self.message.tokens_per_block(x.device)  # nothing of the size of all edges is kept
        for a in range(0, max(1, len(source)), max(1, step)):  # once without edges too: DDP wants gradients
            src, dst = source[a : a + step], target[a : a + step]
            difference = features.index_select(0, src) - features.index_select(0, dst)
            messages = self.message.by_blocks(difference.T, edges.scalars[:, a : a + step], function=self._message)
            sums.index_add_(0, dst, messages.T)
        degree = torch.zeros(tokens, dtype=x.dtype, device=x.device).index_add_(0, target, x.new_ones(len(target)))
        mean = (sums / degree.clamp(min=1)[:, None]).T
        return self.update.by_blocks(x, pos, mean, function=self._update)

    def _message(self, difference: Tensor, scalars: Tensor) -> Tensor:
        x, pos = difference.split([self.grades.dim, 3])
        return self.message(join_channels((self.grades, x), (POSITION, pos), (self.edge_grades, scalars))[1])

    def _update(self, x: Tensor, pos: Tensor, mean: Tensor) -> Tensor:
        return x + self.update(join_channels((self.grades, x), (POSITION, pos), (self.messages, mean))[1])

    def reset_parameters(self) -> None:
        reset_children(self)
