"""Attention with relative positions as PyTorch Geometric layers: graphs of pixels, or any with ``pos``."""

from tg_equiattn import checks as _checks

from .._host import require

require("torch_geometric", "pyg")

from .conv import RelativePerformerConv  # noqa: E402
from .ewald import EwaldAttention, ewald_settings  # noqa: E402
from .gps import RelativeGPSBlock  # noqa: E402
from .transforms import PeriodicRadiusGraph, PixelGraph  # noqa: E402

__all__ = [
    "EwaldAttention",
    "PeriodicRadiusGraph",
    "PixelGraph",
    "RelativeGPSBlock",
    "RelativePerformerConv",
    "ewald_settings",
]

_checks.refuse_unknown_arguments(globals()[_name] for _name in __all__)
