"""Clifford message passing along edges, before an operator on tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..graphs.neighbors import NeighborList
from ..shapes import Float, Int
from ..tiles import map_tiles
from ..torch_state import is_eager
from .clifford import POSITION, Grades, MultivectorMLP, features, join_channels, with_position


class LocalContext(nn.Module):
    r"""A step of Clifford message passing, as in Geometric Hyena by the authors of SE(3)-Hyena.

    .. math:: x_i \leftarrow x_i + \psi\Big(x_i, \tfrac{1}{|N(i)|} \sum_{j \in N(i)} \phi(x_j - x_i, e_{ij})\Big)

    Here phi and psi are Clifford MLPs, and e are scalars of the edges. The position is one of the vectors of x. The
    mean is zero for a token without edges.
    """

    def __init__(self, grades: Grades, channels: int, edge_channels: int, num_blocks: int) -> None:
        super().__init__()
        self.grades, self.edge_grades, self.messages = grades, Grades(edge_channels), Grades(*[channels] * 4)
        inside = grades.plus(POSITION)
        self.message = MultivectorMLP(inside.plus(self.edge_grades), self.messages, channels, num_blocks)
        self.update = MultivectorMLP(inside.plus(self.messages), grades, channels, num_blocks)

    def forward(
        self, x: Float[Tensor, "dim tokens"], pos: Float[Tensor, "3 tokens"], edges: NeighborList
    ) -> Float[Tensor, "dim tokens"]:
        source, target = edges.source, edges.target
        scalars = x.new_zeros(source.shape[0], 0) if edges.features is None else edges.features.to(x.dtype)
        tokens, step = torch.cat([x, pos]).T.contiguous(), self.message.tokens_per_block(x.device)
        sums = x.new_zeros(tokens.shape[0], self.messages.dim)
        if torch.is_grad_enabled() or not is_eager():
            sums = sums.index_add(0, target, self._messages(tokens, source, target, scalars))
        else:  # messages of all edges together might not fit into memory
            for part in zip(*(y.split(16 * step) for y in (source, target, scalars)), strict=True):
                sums.index_add_(0, part[1], self._messages(tokens, *part))
        degree = x.new_zeros(tokens.shape[0]).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        mean = (sums / degree.clamp(min=1)[:, None]).T.contiguous()
        others, step = (self.update, self.grades, self.messages), self.update.tokens_per_block(x.device)
        return map_tiles(_update, step, (x, pos, mean), *others, dim=-1)

    def _messages(
        self, tokens: Float[Tensor, "tokens dim+3"], source: Int[Tensor, " edges"], target: Int[Tensor, " edges"],
        scalars: Float[Tensor, "edges channels"],
    ) -> Float[Tensor, "edges out"]:  # fmt: skip
        """Messages along edges, from tokens whose last columns are positions."""
        difference = tokens.index_select(0, source) - tokens.index_select(0, target)
        others, step = (self.message, self.grades, self.edge_grades), self.message.tokens_per_block(tokens.device)
        return map_tiles(_message, step, (difference, scalars), *others)


def _message(
    difference: Tensor, scalars: Tensor, message: MultivectorMLP, grades: Grades, edge_grades: Grades
) -> Tensor:
    x, pos = difference.T.contiguous().split([grades.dim, 3])
    parts = with_position(grades.parts(x), pos)
    return features(message(join_channels(parts, edge_grades.parts(scalars.T)))).T.contiguous()


def _update(x: Tensor, pos: Tensor, mean: Tensor, update: MultivectorMLP, grades: Grades, messages: Grades) -> Tensor:
    parts = with_position(grades.parts(x), pos)
    return x + features(update(join_channels(parts, messages.parts(mean))))
