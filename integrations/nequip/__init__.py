"""What is far, for NequIP models: Ewald attention as a graph module, and a builder of models with it."""

from .._host import require

require("nequip", "nequip")

from .long_range import LongRange, LongRangeNequIPGNNModel  # noqa: E402

__all__ = ["LongRange", "LongRangeNequIPGNNModel"]
