"""Long range for NequIP models: Ewald attention and charges as graph modules, and a builder of models with them."""

from .._host import require

require("nequip", "nequip")

from nequip.scripts._package_utils import register_libraries_as_external_for_packaging  # noqa: E402

from .lammps import write_lammps  # noqa: E402
from .long_range import LongRange, LongRangeCharges  # noqa: E402
from .model import FitCharges, LongRangeNequIPGNNModel  # noqa: E402

register_libraries_as_external_for_packaging(
    ["scipy", "sympy"],  # scipy if it is installed
    mock_modules=["jaxtyping"],  # imported for type checkers alone
)

__all__ = ["FitCharges", "LongRange", "LongRangeCharges", "LongRangeNequIPGNNModel", "write_lammps"]
