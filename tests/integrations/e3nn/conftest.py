"""Modules and graphs for the e3nn tests. Sizes are distinct primes where nothing else is said."""

from functools import partial

import pytest
import torch
from cases import einsums_as_written
from e3nn import o3
from e3nn.util.test import assert_equivariant
from space import batch_of
from tg_equiattn.integrations.e3nn import (
    IrrepsEwaldAttention,
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    TensorProductHyenaOperator,
)

from tg_equiattn.testing import TOLERANCE

IRREPS = "3x0o+2x1e+4x0e+3x1o+1x0e", "2x1o+3x0e+1x1e+1x0o", "2x0e+3x1o+2x1e+1x0o"
HIGHER = "3x0e+2x1o+1x2e", "2x0e+1x2e+1x1o"
IMPLICIT = {"filter": "implicit", "short_conv": 3}
KINDS = {
    "hyena": IrrepsSE3HyenaOperator,
    "radial": partial(IrrepsSE3HyenaOperator, order="radial"),
    "implicit": partial(IrrepsSE3HyenaOperator, **IMPLICIT),
    "exponential": partial(IrrepsSE3HyenaOperator, filter="exponential"),
    "model": partial(IrrepsSE3Hyena, num_layers=2),
    "attention": IrrepsVectorSelfAttention,
    "tensor": TensorProductHyenaOperator,
    "tensor implicit": partial(TensorProductHyenaOperator, causal=True, **IMPLICIT),
    "tensor acausal": partial(TensorProductHyenaOperator, **IMPLICIT),
    "tensor radial": partial(TensorProductHyenaOperator, order="radial"),
    "ewald": partial(IrrepsEwaldAttention, width=2.0, output_scale=20),
}


@pytest.fixture(autouse=True)
def _einsums_as_written():
    with einsums_as_written("e3nn"):
        yield


@pytest.fixture(params=[torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["float64", "float32"])
def default_dtype(request):
    """e3nn computes constants, and its checker picks tolerances, by the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def new_module():
    """A module of a kind between these irreps, or its usual ones."""
    return lambda kind, *irreps: KINDS[kind](*(irreps or (HIGHER if "tensor" in kind else IRREPS)))


@pytest.fixture
def make_module(randomise, new_module):
    return lambda *arguments: randomise(new_module(*arguments))


@pytest.fixture
def graphs():
    """Arguments of a module for a batch of graphs of these sizes, edges among them where it takes them."""

    def make(module, sizes, device=None):
        batch = batch_of(sizes)
        out = {"x": module.irreps_in.randn(sum(sizes), -1), "pos": torch.randn(sum(sizes), 3), "batch": batch}
        if getattr(getattr(getattr(module, "module", module), "options", None), "causal", False):
            del out["pos"]
        return out if device is None else {name: value.to(device) for name, value in out.items()}

    return make


@pytest.fixture
def equal():
    def check(got, wanted, tolerance=1e-12):
        assert got.shape == wanted.shape
        scale = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * scale)

    return check


@pytest.fixture
def check_equivariant():
    """e3nn's own check, and a tighter one but for translated float32 positions, which are rounded; no irrep is zero."""

    def check(function, arguments, irreps_in, irreps_out):
        irreps_out = o3.Irreps(irreps_out)
        out = function(*arguments).detach()
        assert out.isfinite().all()
        assert all(float(out[..., part].abs().max()) > 1e-3 for part in irreps_out.slices())
        function = torch.no_grad()(function)
        scale = max(1.0, float(out.abs().max()))
        loose = {torch.float64: 1e-9, torch.float32: 1e-3}[torch.get_default_dtype()]
        errors = assert_equivariant(function, arguments, irreps_in, irreps_out, tolerance=loose * scale)
        for (_, translated), worst in errors.items():
            if not translated or out.dtype == torch.float64:
                assert float(worst) <= TOLERANCE[out.dtype] * scale

    return check
