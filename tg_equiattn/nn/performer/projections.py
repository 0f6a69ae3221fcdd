"""Linear maps of nodes to queries, keys, values and biases of keys."""

from __future__ import annotations

from torch import nn


def make_linear(in_channels: int, out_channels: int) -> nn.Linear:
    """A linear map without bias; ``in_channels`` -1 reads the width from the first input."""
    return nn.LazyLinear(out_channels, False) if in_channels == -1 else nn.Linear(in_channels, out_channels, False)


class KeyBias(nn.Linear):
    """A linear map to one number for each head. It starts at zero: models whose biases start at random are less
    accurate in graphs larger than those of training."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class LazyKeyBias(nn.LazyLinear):
    """:class:`KeyBias` before its first input."""

    cls_to_become = KeyBias

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params():
            nn.init.zeros_(self.weight)


def make_key_bias(in_channels: int, heads: int) -> nn.Linear:
    """A :class:`KeyBias`; ``in_channels`` -1 reads the width from the first input."""
    return LazyKeyBias(heads, False) if in_channels == -1 else KeyBias(in_channels, heads, False)
