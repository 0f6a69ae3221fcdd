"""What layers and kernels refuse: each error names the argument."""

import math

import pytest
import torch

from tg_equiattn import functional as F
from tg_equiattn.nn import EwaldAttention

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

BOUNDS = ((0.8, 1.0), (1.0, 1.2), (0.8, 1.0), (1.0, 1.2))
KERNELS = {"widths": torch.ones(2, 4), "gains": torch.ones(2, 4, 2), "bounds": BOUNDS}
CUBE = torch.eye(3)


def ewald(cell=None, pbc=None, **options):
    pos = torch.arange(18.0).view(6, 3).sin()
    return lambda: EwaldAttention(2, 0, width=0.8, **options)(torch.ones(6, 2), None, pos=pos, cell=cell, pbc=pbc)


def kernels(**change):
    return lambda: F.Gaussian(**KERNELS | change)


REFUSED = [
    ("method must be 'auto', 'ewald' or 'nufft' for graphs that repeat", ewald(method="direct", cell=CUBE)),
    ("cell must be given with pbc, got None", ewald(pbc=torch.ones(3) > 0)),
    (r"cell must be .* \(3, 3\) or \(1, 3, 3\), got .* \(2, 3, 3\)", ewald(cell=torch.ones(2, 3, 3))),
    (r"cell must be floating point of shape \(3, 3\) or .*, got ndarray", ewald(cell=CUBE.numpy())),
    ("cell must be floating point of shape .*, got torch.int64", ewald(cell=CUBE.long())),
    ("cell must be finite", ewald(cell=CUBE * math.nan)),
    ("cell must have a volume", ewald(cell=torch.ones(3, 3) + 1e-9 * CUBE)),
    ("pbc must let graphs repeat along three directions, two or none, got one for graph 0: the potential of a wire",
     ewald(cell=CUBE, pbc=torch.tensor([True, False, False]))),
    ("pbc must be bool", ewald(cell=CUBE, pbc=torch.ones(3))),
    (r"width must be larger, .* reciprocal vectors shorter than", ewald(cell=1e4 * CUBE, method="ewald")),
    (r"max_hkl must be larger .*; .* needs at least \(\d+, \d+, \d+\)", ewald(cell=9 * CUBE, max_hkl=(2, 2, 2))),
    ("bounds must be 4 pairs", kernels(bounds=BOUNDS[:3])),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:cell of graph 0 is far wider")
@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("call", [ewald()])
def test_what_is_changed_is_good(call):
    call()
