"""Compilation, TorchScript's refusal, copies, printing, half precision, and devices without values."""

import copy
import io
import pickle

import pytest
import torch
from e3nn import o3
from e3nn.util import jit
from space import batch_of
from tg_equiattn.integrations.e3nn import (
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    LongTensorProduct,
    TensorProductHyenaOperator,
)

SIZES, COUNTS = (7, 1, 11), {"batch_size": 3, "max_num_nodes": 11}


def differentiated(module, arguments):
    x = arguments["x"].clone().requires_grad_()
    out = module(**{**arguments, "x": x})
    return out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()], allow_unused=True)


def check_compiled(module, arguments, equal):
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(differentiated(compiled, arguments), differentiated(module, arguments), strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            equal(got, wanted, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hyena", "attention"])
def test_compiles_whole(on_device, kind, double, make_module, graphs, equal):
    module = make_module(kind)
    check_compiled(module, graphs(module, SIZES) | COUNTS, equal)


@pytest.mark.parametrize("kind", ["hyena", "attention"])
def test_compiling_needs_counts(kind, double, make_module, graphs):
    module = make_module(kind)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="batch_size and max_num_nodes must be given"):
        compiled(**graphs(module, SIZES))


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


@pytest.mark.parametrize("name", MODULES)
def test_repr_and_irreps(name):
    module = MODULES[name]()
    inside, outside = {
        "IrrepsSE3HyenaOperator": ("16x0e+8x1o", "16x0e+8x1o"),
        "IrrepsVectorSelfAttention": ("2x0e+3x1o", "5x1o"),
        "IrrepsSE3Hyena": ("2x0e+3x1o", "5x1o+1x0o"),
        "TensorProductHyenaOperator": ("2x0e+3x1o+1x2e", "5x1o+1x0e"),
    }[name]
    weights = sum(p.numel() for p in module.parameters())
    assert weights > 100
    assert repr(module) == f"{name}({inside} -> {outside} | {weights} weights)"
    assert isinstance(module.irreps_in, o3.Irreps)
    assert isinstance(module.irreps_out, o3.Irreps)
    assert (module.irreps_in, module.irreps_out) == (o3.Irreps(inside), o3.Irreps(outside))


def copies(make, module):
    buffer, loaded = io.BytesIO(), make()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    return loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("name", MODULES)
def test_copies(name, randomise):
    module = randomise(MODULES[name]())
    arguments = {"x": module.irreps_in.randn(19, -1), "pos": torch.randn(19, 3), "batch": batch_of(SIZES)}
    expected = module(**arguments)
    for other in copies(MODULES[name], module):
        torch.testing.assert_close(other(**arguments), expected, rtol=0, atol=0)
        assert repr(other) == repr(module)


def test_copies_of_the_tensor_product(randomise):
    make = lambda: LongTensorProduct("2x0e+3x1o", "1x0e+1x2e", "3x1o+2x2e", causal=True)  # noqa: E731
    conv = randomise(make())
    x1, x2 = torch.randn(19, 11), torch.randn(19, 6)
    for other in copies(make, conv):
        torch.testing.assert_close(other(x1, x2, batch_of(SIZES)), conv(x1, x2, batch_of(SIZES)), rtol=0, atol=0)


def test_state_holds_parameters_only():
    for make in MODULES.values():
        module = make()
        if not isinstance(module, TensorProductHyenaOperator):  # e3nn's maps have masks
            assert list(module.state_dict()) == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("name", ["IrrepsSE3HyenaOperator", "IrrepsVectorSelfAttention", "IrrepsSE3Hyena"])
def test_reset_parameters(name):
    torch.manual_seed(11)
    module = MODULES[name]()
    before = [p.clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(torch.nan)
    torch.manual_seed(11)
    module.reset_parameters()
    assert all(p.isfinite().all() for p in module.parameters())
    assert any(not torch.equal(a, b) or a.std() == 0 for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["hyena", "local", "model", "attention", "attention local", "tensor"])
def test_autocast(on_device, kind, dtype, make_module, graphs):
    module = make_module(kind)
    arguments = graphs(module, SIZES)
    expected = module(**arguments)
    with torch.autocast(on_device, dtype):
        for x in (arguments["x"], arguments["x"].to(dtype)):
            out = module(**{**arguments, "x": x})
            assert out.isfinite().all()
            error = (out.float() - expected).abs().max() / expected.abs().max()
            assert error < 5e-2
            grads = torch.autograd.grad(out.float().square().mean(), list(module.parameters()), allow_unused=True)
            assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_without_graphs(on_device, dtype, randomise):
    conv = randomise(LongTensorProduct(*["2x0e+1x1o"] * 3))
    x1, x2 = torch.randn(11, 5), torch.randn(11, 5)
    wanted = conv(x1, x2)
    with torch.autocast(on_device, dtype):
        got = conv(x1.to(dtype), x2)
    assert got.isfinite().all()
    assert (got.float() - wanted).abs().max() < 5e-2 * wanted.abs().max()
