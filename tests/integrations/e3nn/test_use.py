"""Compilation, TorchScript's refusal, copies, printing, half precision, and devices without values."""

import pytest
import torch
from e3nn import o3
from e3nn.util import jit
from tg_equiattn.integrations.e3nn import (
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    LongTensorProduct,
    TensorProductHyenaOperator,
)

SIZES, COUNTS = (7, 1, 11), {"batch_size": 3, "max_num_nodes": 11}


MODULES = {
    "IrrepsSE3HyenaOperator": lambda: IrrepsSE3HyenaOperator("16x0e + 8x1o", "16x0e + 8x1o"),
    "IrrepsVectorSelfAttention": lambda: IrrepsVectorSelfAttention("2x0e + 3x1o", o3.Irreps("5x1o")),
    "IrrepsSE3Hyena": lambda: IrrepsSE3Hyena(o3.Irreps("2x0e + 3x1o"), "5x1o + 1x0o", "2x0e + 3x1o + 2x1e", depth=2),
    "TensorProductHyenaOperator": lambda: TensorProductHyenaOperator("2x0e+3x1o+1x2e", "5x1o+1x0e"),
}


@pytest.mark.parametrize("name", [*MODULES, "LongTensorProduct"])
def test_torchscript_is_refused(name):
    make = MODULES.get(name, lambda: LongTensorProduct("2x0e", "2x0e", "2x0e"))
    with pytest.raises(NotImplementedError, match=f"{name} does not support TorchScript"):
        jit.compile(make())
    with pytest.raises(NotImplementedError, match=f"{name} does not support TorchScript"):
        jit.script(torch.nn.Sequential(o3.Linear("2x0e", "2x0e"), make()))
    with pytest.raises((UserWarning, NotImplementedError), match=rf"of type {name}|not support TorchScript"):
        jit.script(make())
    for module in (make(), torch.nn.Sequential(torch.nn.Linear(2, 2), make())):
        with pytest.raises(NotImplementedError, match=rf"{name} does not .* use torch.compile, or torch.export"):
            torch.jit.script(module)
