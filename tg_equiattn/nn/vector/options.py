"""What the operators of a model have in common: made and checked once, handed down whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ... import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """Of every operator; the arguments are told at :class:`SE3HyenaOperator`, ``num_blocks`` at :class:`SE3Hyena`."""

    local_context: bool = False
    edge_channels: int = 0
    short_conv: int | None = None
    num_blocks: int = 1

    def __post_init__(self) -> None:
        checks.positive(num_blocks=self.num_blocks)
        check_short_conv(self.short_conv)
        edges = self.edge_channels
        if isinstance(edges, bool) or not isinstance(edges, int) or edges < 0:
            raise ValueError(f"edge_channels must be an integer from 0 on, got {edges!r}")
        if edges and not self.local_context:
            raise ValueError(f"edge_channels must be 0 without local_context, got {edges}")


Options = TypeVar("Options", bound=OperatorOptions)


def options_of(kind: type[Options], given: Mapping[str, Any] | None, **others: Any) -> Options:
    """From those that a user gave a model, and others."""
    allowed = [field.name for field in dataclasses.fields(kind) if field.name not in others]
    unknown = [name for name in given or {} if name not in allowed]
    if unknown:
        raise ValueError(f"options must be of {tuple(allowed)}, got {unknown[0]!r}")
    return kind(**(given or {}), **others)


def check_short_conv(taps: int | None) -> None:
    """ValueError unless ``None`` or an odd number from 3 on."""
    if taps is not None and (isinstance(taps, bool) or not isinstance(taps, int) or taps < 3 or not taps % 2):
        raise ValueError(f"short_conv must be None or an odd number of taps from 3 on, got {taps!r}")
