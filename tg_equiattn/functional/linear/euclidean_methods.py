r"""The two ways to compute Euclidean attention of padded sequences: through directions, and over all pairs.

Tensors of nodes are (..., B, N), nodes last, with zeros where a sequence of its own length has ended: queries and keys
(H, F, 2, K, B, N), values (H, V, B, N), positions (3, B, N), frequencies (H or 1, F).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics, spherical_bessel
from ...ranks import Ranks
from ...sequences import token_blocks
from .plane_waves import plane_wave_reading, plane_wave_table

Product = Callable[[Tensor, Tensor, int], Tensor]

METHODS = ("auto", "directions", "pairs")
PAIRS_BELOW = 64  # nodes: from here on directions are faster. A power of 2, as Sequences groups lengths by powers of 2
_BLOCK_PAIRS = {"cpu": 1 << 17, "other": 1 << 25}  # pairs times frequencies of a block


@dataclasses.dataclass(frozen=True)
class EuclideanMethod:
    """What is the same for all sequences of a batch.

    Args:
        product: of features (..., H, V), harmonics of one degree (..., 1, 2 l + 1) and the degree l, to (..., H, E),
            linear in both.
        lmax: the highest degree of harmonics.
        rule: directions (D, 3), one of each pair, and their weights (D,); None for pairs.
        method: one of METHODS.
        backend: of the operators.
        ranks: among which the nodes of every sequence are shared; not by pairs.
    """

    product: Product
    lmax: int
    rule: tuple[Tensor, Tensor] | None
    method: str
    backend: str
    ranks: Ranks | None = None

    def of_nothing(self, value: Tensor) -> Tensor:
        """Sums (H, E, 0) for values (H, V, 0), where there are no nodes at all."""
        some = value.movedim(-1, 0)
        return self.product(some, some.new_zeros(0, 1, 1), 0).movedim(0, -1)

    def attend(self, pos: Tensor, query: Tensor, key: Tensor, value: Tensor, frequencies: Tensor) -> Tensor:
        """Sums over each sequence (H, E, B, N)."""
        query = query / (query.shape[1] * 2 * query.shape[3]) ** 0.5
        few = self.method == "auto" and self.ranks is None and pos.shape[-1] < PAIRS_BELOW
        if self.rule is None or self.method == "pairs" or few:
            step = max(1, _BLOCK_PAIRS.get(pos.device.type, _BLOCK_PAIRS["other"]) // max(1, key[:, :, 0, 0].numel()))
            return token_blocks(
                lambda pos_i, query_i: self._pairs(pos_i, query_i, pos, key, value, frequencies), step, (pos, query)
            )
        return self._directions(self.rule, pos, query, key, value, frequencies)

    def _directions(
        self, rule: tuple[Tensor, Tensor], pos: Tensor, query: Tensor, key: Tensor, value: Tensor, frequencies: Tensor
    ) -> Tensor:
        """Through waves of all frequencies in all directions."""
        directions, weights = rule
        waves = frequencies[:, None, :, None] * directions[:, None]
        waves = waves.expand(pos.shape[1], value.shape[0], *waves.shape[1:])
        harmonics = (solid_harmonics(directions, self.lmax) * weights[:, None])[None]
        return self._through_table(pos, query, key, value, waves, harmonics, None)

    def attend_crystals(
        self, pos: Tensor, query: Tensor, key: Tensor, value: Tensor, waves: Tensor, weights: Tensor, ways: Tensor
    ) -> Tensor:
        """Sums over each crystal and its images (H, E, B, N), through the waves that repeat with it.

        Args:
            pos, query, key, value: as :meth:`attend`'s.
            waves: (B, D, 3), phases of a unit of the positions.
            weights: (B, H, D, F), of the waves.
            ways: (B, D, 3), unit vectors along them.
        """
        query = query / (query.shape[1] * 2 * query.shape[3]) ** 0.5
        channels = query.shape[3]
        query, key = (x.transpose(1, 2).flatten(2, 3)[:, None] for x in (query, key))  # pairs of one frequency
        waves = waves[:, None, :, None].expand(-1, value.shape[0], -1, -1, -1)
        weights = weights.repeat_interleave(channels, 3).movedim(1, 3)[:, :, None, None, None, :, :, None]
        return self._through_table(pos, query, key, value, waves, solid_harmonics(ways, self.lmax), weights)

    def _through_table(
        self, pos: Tensor, query: Tensor, key: Tensor, value: Tensor, waves: Tensor, harmonics: Tensor,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Through one table a sequence and head, of waves (B, H, D, F, 3) with harmonics (B or 1, D, L) of their
        directions, and weights that broadcast to (B, D, F, cosine or sine, 2, K, H, V)."""
        heads, channels, count = value.shape[0], query.shape[3], pos.shape[1]
        waves = waves.flatten(0, 1)
        places = pos.permute(1, 0, 2)[:, None].expand(-1, heads, -1, -1).flatten(0, 1).mT
        query, key = (x.flatten(2, 3).permute(3, 0, 1, 2, 4).flatten(0, 1).permute(0, 3, 1, 2) for x in (query, key))
        value = value.permute(2, 0, 1, 3).flatten(0, 1).mT
        table = plane_wave_table(places, key, value, waves, self.backend)
        table = table if self.ranks is None else self.ranks.sum(table)
        table = table.unflatten(0, (count, heads)).unflatten(5, (2, channels))  # B, H, D, F, cosine or sine, 2, K, V
        table = table.movedim(1, -2)
        table = table if weights is None else table * weights
        turned = _quarter_turn(table) if self.lmax else table
        harmonics = harmonics[:, :, None, None, None, None, None]
        parts = [
            self.product(turned if degree % 2 else table, harmonics[..., degree**2 : (degree + 1) ** 2], degree)
            for degree in range(self.lmax + 1)
        ]
        mixed = sum(parts[1:], parts[0])
        mixed = mixed.movedim(-2, 1).flatten(5, 6).flatten(0, 1)
        out = plane_wave_reading(places, query, waves, mixed.contiguous(), self.backend)
        return out.unflatten(0, (count, heads)).permute(1, 3, 0, 2)

    def _pairs(
        self, pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor, frequencies: Tensor
    ) -> Tensor:
        """The exact limit, of a block of queries (..., B, n) and all keys."""
        apart = pos_i[..., :, None] - pos[..., None, :]  # 3, B, n, N
        square = apart.square().sum(0)[:, None, None]
        frequencies = frequencies[..., None, None]
        bessel = spherical_bessel(square * frequencies.square(), self.lmax)  # B, H or 1, F, n, N
        harmonics = solid_harmonics(apart.movedim(0, -1), self.lmax).movedim(-1, 1)[:, None]  # B, 1, L, n, N
        rows = query.flatten(2, 3).permute(3, 0, 1, 4, 2)
        content = rows @ key.flatten(2, 3).permute(3, 0, 1, 2, 4)
        if self.lmax:
            first, second = key.unbind(2)
            turned = rows @ torch.cat([second, -first], 2).permute(3, 0, 1, 2, 4)
        value, out = value.permute(2, 0, 3, 1)[:, :, None], []  # B, H, 1, N, V
        for degree in range(self.lmax + 1):
            weight = ((turned if degree % 2 else content) * bessel[degree] * frequencies**degree).sum(2)[:, :, None]
            weight = weight * harmonics[:, :, degree**2 : (degree + 1) ** 2]
            sums = (-weight if degree % 4 > 1 else weight) @ value  # B, H, 2 l + 1, n, V
            unit = torch.eye(sums.shape[2], dtype=sums.dtype, device=sums.device)[:, None]
            out.append(self.product(sums.permute(0, 3, 2, 1, 4), unit, degree).sum(2))
        return sum(out[1:], out[0]).permute(2, 3, 0, 1)


def _quarter_turn(table: Tensor) -> Tensor:
    """What odd degrees read: sin(a - b) and q_1 k_2 - q_2 k_1 in place of cos(a - b) and q_1 k_1 + q_2 k_2, in a table
    (..., cosine or sine, 2, K, H, V)."""
    cosine, sine = table.unbind(-5)
    (c1, c2), (s1, s2) = cosine.unbind(-4), sine.unbind(-4)
    return torch.stack([torch.stack([-s2, s1], -4), torch.stack([c2, -c1], -4)], -5)
