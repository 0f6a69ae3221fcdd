"""Long range for MACE models: Ewald attention after their product blocks, and energies of charges."""

from .._host import require

require("mace", "mace")  # before e3nn: it lets e3nn 0.4.4 load its constants under torch >= 2.6

from .calculator import ChargeLoss, LongRangeCalculator  # noqa: E402
from .examples import load_example  # noqa: E402
from .lammps import write_lammps  # noqa: E402
from .long_range import (  # noqa: E402
    add_long_range,
    can_predict_charges,
    copy_long_range,
    select_head,
    without_long_range,
)

__all__ = [
    "ChargeLoss",
    "LongRangeCalculator",
    "add_long_range",
    "can_predict_charges",
    "copy_long_range",
    "load_example",
    "select_head",
    "without_long_range",
    "write_lammps",
]
