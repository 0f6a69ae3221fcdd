"""Integration with PyTorch Geometric: no layers yet in this version."""

from .._host import require

require("torch_geometric", "pyg")
