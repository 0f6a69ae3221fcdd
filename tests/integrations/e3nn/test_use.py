"""TorchScript's refusal, whichever way one asks for it."""

import pytest
import torch
from e3nn import o3
from e3nn.util import jit
from tg_equiattn.integrations import e3nn

MODULES = {
    "IrrepsEwaldAttention": lambda *irreps: e3nn.IrrepsEwaldAttention(*irreps, width=1.0),
    "LongTensorProduct": lambda *irreps: e3nn.LongTensorProduct(irreps[0], *irreps),
}
NAMES = ["IrrepsSE3HyenaOperator", "IrrepsVectorSelfAttention", "IrrepsSE3Hyena", "TensorProductHyenaOperator"]


@pytest.mark.parametrize("name", [*NAMES, *MODULES])
def test_torchscript_is_refused(name):
    module = MODULES.get(name, getattr(e3nn, name))("2x0e+1x1o", "2x0e")
    for script, given in ((jit.compile, module), (jit.script, torch.nn.Sequential(o3.Linear("2x0e", "2x0e"), module))):
        with pytest.raises(NotImplementedError, match=f"{name} does not support TorchScript"):
            script(given)
    with pytest.raises((UserWarning, NotImplementedError), match=rf"of type {name}|not support TorchScript"):
        jit.script(module)
    for given in (module, torch.nn.Sequential(torch.nn.Linear(2, 2), module)):
        with pytest.raises(NotImplementedError, match=rf"{name} does not .* use torch.compile, or torch.export"):
            torch.jit.script(given)
