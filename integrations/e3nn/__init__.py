"""Integration with e3nn: no layers yet in this version."""

from .._host import require

require("e3nn", "e3nn")
