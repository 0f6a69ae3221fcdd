"""The two kinds of positions of the Relative Performer's paper: relative sinusoids and clipped distances."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...functional.performer.linear_attention import Inputs
from ...functional.performer.near_pairs import clipped_attention_impl
from ...modes import full_precision
from ..modules import reset_children
from .nodes import Needs, Nodes
from .positions import Position

if TYPE_CHECKING:
    from jaxtyping import Float

CUTOFF = 6  # pixels
LONGEST = 1e4  # scale of the sinusoids, in units of positions: Vaswani et al., Attention is all you need (2017), 3.5
LENGTH_SCALES = 4  # learned frequencies an axis: relative-performer appendix A.2


class SinusoidPosition(Position):
    """Strategy 1: queries and keys get more channels, whose products depend on relative positions only."""

    def __init__(self, heads: int, pos_dim: int) -> None:
        super().__init__(Needs(pos_dim, positions=True, why="position='sinusoid' needs it"), heads)
        self.sinusoid = SinusoidEncoding(pos_dim, heads)
        self.extra_channels = self.sinusoid.channels

    def forward(self, inputs: Inputs, nodes: Nodes) -> Float[Tensor, "heads nodes e"]:
        query, key = self.sinusoid(nodes.pos)
        query, key = torch.cat([inputs.query, query], -1), torch.cat([inputs.key, key], -1)
        return super().forward(inputs._replace(query=query, key=key), nodes)


def _frequencies(count: int, device: torch.device | None = None) -> Float[Tensor, " count"]:
    return LONGEST ** -(torch.arange(count, device=device) / count)


class SinusoidEncoding(nn.Module):
    r"""Channels of queries and keys whose products depend on relative positions only (strategy 1).

    .. math:: q_p = [\sin \omega x, \cos \omega x] \begin{bmatrix} \alpha & \beta \\ -\beta & \alpha \end{bmatrix},
        \quad k_p = [\sin \omega x, \cos \omega x], \quad
        \langle q_p(x), k_p(x') \rangle = \alpha \cos \omega (x - x') + \beta \sin \omega (x - x')

    Every axis has 4 learned frequencies :math:`\omega`, which start at 1 and fall geometrically towards 1e-4.
    :math:`\alpha` and :math:`\beta` are learned for each head and frequency (Lemma 1). The products are exact functions
    of relative positions; attention that estimates their exponential by random features is one in expectation only.
    There are 8 · pos_dim channels.

    Source: relative-performer section 2.3, strategy 1, and appendix A.1. The appendix's second line has the sign of
    :math:`\beta` wrong twice; its result is right.
    """

    def __init__(self, pos_dim: int, heads: int) -> None:
        super().__init__()
        self.pos_dim, self.heads, self.channels = pos_dim, heads, 2 * pos_dim * LENGTH_SCALES
        self.frequency = nn.Parameter(torch.empty(pos_dim, LENGTH_SCALES))
        self.rotation = nn.Parameter(torch.empty(2, heads, pos_dim, LENGTH_SCALES))  # alpha, beta
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.frequency.copy_(_frequencies(LENGTH_SCALES).expand(self.pos_dim, -1))
            self.rotation.normal_(std=2.0)

    def forward(
        self, pos: Float[Tensor, "nodes dim"]
    ) -> tuple[Float[Tensor, "heads nodes channels"], Float[Tensor, "heads nodes channels"]]:
        with full_precision(pos.device):
            exact = torch.promote_types(pos.dtype, self.frequency.dtype)  # positions in float64 may be large
            angle = pos.to(exact)[..., None] * self.frequency  # (N, dim, scales)
            sin, cos = (x.to(self.frequency.dtype) for x in (angle.sin(), angle.cos()))
            alpha, beta = self.rotation[:, :, None]  # (heads, 1, dim, scales)
            query = torch.stack([alpha * sin - beta * cos, beta * sin + alpha * cos], -1)
            key = torch.stack([sin, cos], -1).flatten(1)
            return query.flatten(2), key.expand(self.heads, -1, -1)

    def extra_repr(self) -> str:
        return f"pos_dim={self.pos_dim}, heads={self.heads}"


class ClippedPosition(Position):
    """Strategy 2: half of the heads weigh values by their clipped distance only, the others have no positions."""

    def __init__(self, heads: int, pos_dim: int, cutoff: int, key_channels: int) -> None:
        why = "position='clipped' needs offsets, from pos, edges or a grid"
        position_heads = max(1, heads // 2)
        super().__init__(Needs(pos_dim, cutoff, neighbors=True, whole=True, why=why), heads - position_heads)
        self.distance_table = nn.Parameter(torch.empty(position_heads, cutoff + 1, key_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.normal_(self.distance_table)

    def forward(self, inputs: Inputs, nodes: Nodes) -> Float[Tensor, "heads nodes e"]:
        (query, _, value), content = inputs[:3], self.key_heads
        by_distance = inputs._replace(query=query[content:], value=value[content:])
        out = clipped_attention_impl(by_distance, self.distance_table, nodes.near, nodes.node_batch)
        if not content:
            return out
        by_content = inputs._replace(query=query[:content], value=value[:content])
        return torch.cat([super().forward(by_content, nodes), out])
