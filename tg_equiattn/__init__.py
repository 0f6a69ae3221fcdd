"""Attention and long context with exact symmetry, for escnn, PyG and e3nn.

The core imports torch alone. Integrations live in ``tg_equiattn.integrations.escnn``, ``.pyg`` and ``.e3nn``.
"""

__version__ = "0.1.0"
