"""The e3nn modules on fused kernels against themselves in plain torch."""

import copy
import io
import pickle

import pytest
import torch
from tg_equiattn.integrations.e3nn import CliffordMLP, SE3Hyena, SE3HyenaOperator, VectorSelfAttention

pytest.importorskip("triton", reason="Triton is not installed")

INSIDE, OUTSIDE, HIDDEN = "2x0e+1x1o+1x0o", "1x1o+2x0e+1x1e", "1x0e+2x1o+1x1e"
LOCAL = {"local_context": True, "edge_channels": 1}
KINDS = {
    "mlp": lambda **o: CliffordMLP(INSIDE, OUTSIDE, 2, **o),
    "hyena": lambda **o: SE3HyenaOperator(INSIDE, OUTSIDE, HIDDEN, gate_channels=2, **LOCAL, **o),
    "model": lambda **o: SE3Hyena(INSIDE, OUTSIDE, HIDDEN, depth=1, gate_channels=1, pool="mean", **o),
    "attention": lambda **o: VectorSelfAttention(INSIDE, OUTSIDE, HIDDEN, **o),
}


pytestmark = pytest.mark.usefixtures("kernels_run")


def arguments(kind, module, graphs, device):
    if kind == "mlp":
        return {"x": module.irreps_in.randn(7, -1).to(device)}
    return graphs(module, (5, 1, 3), device)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(kind, double, randomise, graphs, equal, device, launches):
    plain, fused = randomise(KINDS[kind](backend="torch")), KINDS[kind](backend="triton")
    buffer = io.BytesIO()
    torch.save(plain.state_dict(), buffer)
    buffer.seek(0)
    fused.load_state_dict(torch.load(buffer, weights_only=True))
    plain, fused = plain.to(device), fused.to(device)
    given = arguments(kind, plain, graphs, device)
    results = []
    for module in (plain, fused):
        x = given["x"].clone().requires_grad_()
        out = module(**{**given, "x": x})
        direction = torch.cos(torch.arange(out.numel(), dtype=out.dtype, device=device)).view_as(out)
        grads = torch.autograd.grad((out * direction).sum(), [x, *module.parameters()], allow_unused=True)
        results.append((out, *(grad for grad in grads if grad is not None)))
        assert bool(launches) == (module is fused)
    assert results[0][0].abs().max() > 1e-3
    for got, wanted in zip(results[1], results[0], strict=True):
        equal(got, wanted, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_launches_nothing(kind, double, randomise, graphs, device, launches):
    module = randomise(KINDS[kind]()).to(device)
    assert module(**arguments(kind, module, graphs, device)).isfinite().all()
    assert not launches


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_repr(kind):
    module, auto = KINDS[kind](backend="triton"), KINDS[kind]()
    assert repr(module) == repr(auto)
    assert list(module.state_dict()) == list(auto.state_dict())
    for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        chosen = {part.backend for part in other.modules() if hasattr(part, "backend")}
        assert chosen == {"triton"}
        assert repr(other) == repr(module)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_backends_are_refused(kind):
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'cuda'"):
        KINDS[kind](backend="cuda")
