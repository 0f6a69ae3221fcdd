"""One step of Clifford message passing along the edges of a graph, on tokens kept as (rows, T)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...transforms import transformed
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
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
            messages = self._messages(features, source, target, edges.scalars)
            sums = x.new_zeros(tokens, self.messages.dim).index_add(0, target, messages)
        else:  # nothing of the size of all edges is kept
            sums = x.new_zeros(tokens, self.messages.dim)
            step = 16 * self.message.tokens_per_block(x.device)
            blocks = (y.split(step, -1) for y in (source, target, edges.scalars))
            for src, dst, scalars in zip(*blocks, strict=True):
                sums.index_add_(0, dst, self._messages(features, src, dst, scalars))
        degree = torch.zeros(tokens, dtype=x.dtype, device=x.device).index_add_(
            0, target, torch.ones_like(target, dtype=x.dtype)
        )
        mean = (sums / degree.clamp(min=1)[:, None]).T
        return self.update.by_blocks(x, pos, mean, function=self._update)

    def _messages(self, features: Tensor, source: Tensor, target: Tensor, scalars: Tensor) -> Tensor:
        """(edges, rows) of tokens (tokens, rows)."""
        difference = features.index_select(0, source) - features.index_select(0, target)
        return self.message.by_blocks(difference.T, scalars, function=self._message).T

    def _message(self, difference: Tensor, scalars: Tensor) -> Tensor:
        x, pos = difference.split([self.grades.dim, 3])
        return self.message(join_channels((self.grades, x), (POSITION, pos), (self.edge_grades, scalars))[1])

    def _update(self, x: Tensor, pos: Tensor, mean: Tensor) -> Tensor:
        return x + self.update(join_channels((self.grades, x), (POSITION, pos), (self.messages, mean))[1])

    def reset_parameters(self) -> None:
        reset_children(self)
