"""Try an installed tg_equiattn from outside of its checkout: every module, and one layer of each extra that is there.

python .ci/smoke.py [EXTRA ...]    the extras that are installed, such as: pyg e3nn
"""

import importlib
import pkgutil
import sys
from pathlib import Path

import torch

import tg_equiattn
from tg_equiattn.groups import dihedral
from tg_equiattn.nn import EwaldAttention, GEViT
from tg_equiattn.testing import equivariance_error

HOSTS = ("escnn", "pyg", "e3nn", "mace", "nequip", "lammps")


def escnn() -> torch.Tensor:
    from escnn import gspaces, nn
    from tg_equiattn.integrations.escnn import R2GroupAttention

    gspace = gspaces.rot2dOnR2(4)
    field = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    return R2GroupAttention(field, field, kernel_size=3)(field(torch.randn(1, 8, 5, 7))).tensor


def pyg() -> torch.Tensor:
    from tg_equiattn.integrations.pyg import RelativePerformerConv

    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    conv = RelativePerformerConv(8, 8, 2, cutoff=3, method="pairs")
    return conv(torch.randn(3, 8), edges, edge_offset=torch.zeros(3, 2), batch=torch.zeros(3, dtype=torch.long))


def e3nn() -> torch.Tensor:
    from tg_equiattn.integrations.e3nn import IrrepsSE3HyenaOperator

    return IrrepsSE3HyenaOperator("4x0e + 2x1o", "4x0e")(torch.randn(7, 10), torch.randn(7, 3))


def nufft() -> torch.Tensor:
    layer = EwaldAttention(4, 2, width=1.0, method="nufft")
    return layer(torch.randn(1, 7, 4), torch.randn(1, 7, 2, 3), pos=torch.randn(1, 7, 3))[0]


LAYERS = {"escnn": escnn, "pyg": pyg, "e3nn": e3nn, "nufft": nufft}


def check_modules(installed: list[str]) -> int:
    """Import every module; an integration whose host is missing must say which extra brings it."""
    checkout = Path(__file__).resolve().parents[1]
    modules = [module.name for module in pkgutil.walk_packages(tg_equiattn.__path__, "tg_equiattn.", lambda name: None)]
    if {"mace", "nequip"} & set(installed):
        installed = [*installed, "lammps"]  # they bring ASE, which is all that it imports
    missing = [host for host in HOSTS if host not in installed]
    for name in modules:
        if name.split(".")[-1] not in missing:
            path = importlib.import_module(name).__file__
            assert path is None or checkout not in Path(path).parents, path
    for host in missing:
        said = ""
        try:
            importlib.import_module(f"tg_equiattn.integrations.{host}")
        except ImportError as error:
            said = str(error)
        assert f"'.[{host}]'" in said, f"importing the integration of {host} said: {said or 'nothing'}"
    assert len(modules) > 70, modules
    return len(modules)


def main() -> None:
    installed = sys.argv[1:]
    count = check_modules(installed)
    model = GEViT(dihedral(4), 1, 10, channels=(6,), heads=2, kernel_size=3).double().eval()
    error = equivariance_error(model, dihedral(4), torch.randn(2, 1, 7, 6).double())
    assert error < 1e-10, error
    for extra in installed:
        assert LAYERS[extra]().isfinite().all(), extra
    names = ", ".join(installed) or "no extra"
    print(f"tg_equiattn {tg_equiattn.__version__} with {names}: {count} modules, equivariance error {error:.0e}")


if __name__ == "__main__":
    main()
