"""The SE(3) modules on fused kernels against themselves in plain torch."""

import copy
import io
import pickle

import pytest
import torch
from clouds import EDGE, S, V, close, dense, gradients, sample

from tg_equiattn.nn import CliffordMLP, SE3Hyena, SE3HyenaOperator, VectorSelfAttention, VectorTransformer
from tg_equiattn.nn.hyena import GradedMLP, Grades, OperatorOptions
from tg_equiattn.sequences import token_blocks

pytest.importorskip("triton", reason="Triton is not installed")

SIZES = [5, 1, 0, 3]
SMALL = {"hidden_scalars": 1, "hidden_vectors": 2}
OPTIONS = {
    "hyena": (SE3HyenaOperator, {"gate_channels": 2}),
    "local": (SE3HyenaOperator, {"local_context": True, "edge_channels": EDGE, "gate_channels": 1, "mlp_channels": 2}),
    "model": (SE3Hyena, {"depth": 2, "gate_channels": 1, **SMALL}),
    "attention": (VectorSelfAttention, {"num_blocks": 2, **SMALL}),
    "transformer": (VectorTransformer, {"depth": 1, "pool": "mean", **SMALL}),
}


pytestmark = pytest.mark.usefixtures("kernels_run")


@pytest.fixture
def make(randomise):
    def make(name, backend, dtype=torch.float64, of=None):
        """With random parameters, or those of another module as a file would bring them."""
        kind, options = OPTIONS[name]
        module = kind(S, V, **options, backend=backend).to(dtype)
        if of is None:
            return randomise(module)
        buffer = io.BytesIO()
        torch.save(of.state_dict(), buffer)
        buffer.seek(0)
        module.load_state_dict(torch.load(buffer, weights_only=True))
        return module

    return make


IN_THE_GATE = [("hyena", False), ("hyena", True), ("local", False), ("attention", False), ("transformer", True)]


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        pytest.param(name, padded, marks=() if (name, padded) in IN_THE_GATE else pytest.mark.slow)
        for name in OPTIONS for padded in (False, True)
    ],
)  # fmt: skip
def test_equals_torch(name, padded, make, device, launches):
    plain = make(name, "torch")
    fused = make(name, "triton", of=plain)
    x = sample(name, SIZES)
    x = dense(x, SIZES, 6, torch.nan)[0] if padded else x
    x = {key: value.to(device) for key, value in x.items()}
    results = []
    for module in (plain.to(device), fused.to(device)):
        out = module(**x)
        results.append((*out, *gradients(out, list(module.parameters()))))
        assert bool(launches) == (module is fused)
    assert all(part.abs().max() > 1e-3 for part in results[0][:2])
    close(results[1], results[0], 1e-8)


@pytest.mark.parametrize("name", ["hyena", "attention"])
def test_float32(name, make, device):
    plain = make(name, "torch", torch.float32).to(device)
    fused = make(name, "triton", torch.float32, of=plain).to(device)
    x = sample(name, SIZES, torch.float32, device)
    close(fused(**x), plain(**x), 1e-4)


def test_inputs_gradients(make, device):
    x = sample("hyena", [3, 2], device=device)
    inputs = [x[key].requires_grad_() for key in ("scalars", "vectors", "pos")]
    plain = make("hyena", "torch").to(device)
    fused = make("hyena", "triton", of=plain).to(device)
    close(gradients(fused(**x), inputs), gradients(plain(**x), inputs), 1e-8)


def test_clifford_mlp(randomise, device, launches):
    plain = randomise(CliffordMLP(3, 2, backend="torch")).double().to(device)
    fused = CliffordMLP(3, 2, backend="triton").double().to(device)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, device=device).requires_grad_()
    results = []
    for mlp in (plain, fused):
        out = mlp(x)
        results.append((out, *gradients([out], [x, *mlp.parameters()])))
    close(results[1], results[0], 1e-10)
    assert launches


def test_blocks_of_tokens(randomise, device, launches):
    """Three, which backward computes again."""
    grades, options = Grades(2, 1), [OperatorOptions(backend=backend) for backend in ("torch", "triton")]
    plain, fused = (GradedMLP(grades, grades, 2, o).double().to(device) for o in options)
    fused.load_state_dict(randomise(plain).state_dict())
    rows = torch.randn(5, 11, dtype=torch.float64, device=device).requires_grad_()
    out, expected = token_blocks(fused, 4, [rows]), plain(rows)
    assert len(launches) == 3
    grads, wanted = (gradients([o], [rows, *m.parameters()]) for o, m in ((out, fused), (expected, plain)))
    assert len(launches) == 6
    close((out, *grads), (expected, *wanted), 1e-10)


@pytest.mark.slow
def test_compiles_whole(randomise, device):
    mlp = randomise(CliffordMLP(2, 3, 2, backend="triton")).to(device)
    x = torch.randn(5, 2, 8, device=device).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, mlp):
        out = function(x)
        results.append((out, *gradients([out], [x, *mlp.parameters()])))
    close(*results, 1e-4)


@pytest.mark.parametrize("name", ["hyena", pytest.param("attention", marks=pytest.mark.slow)])
def test_autocast(name, make, device):
    plain = make(name, "torch", torch.float32).to(device)
    fused = make(name, "triton", torch.float32, of=plain).to(device)
    x = sample(name, SIZES, torch.float32, device)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device, torch.bfloat16):
            y = {key: x[key].to(dtype) for key in ("scalars", "vectors")}
            out, expected = fused(**{**x, **y}), plain(**{**x, **y})
            grads = gradients([part.float() for part in out], list(fused.parameters()))
        assert all(part.isfinite().all() for part in (*out, *grads))
        close([part.float() for part in out], [part.float() for part in expected], 5e-2)


@pytest.mark.parametrize("name", OPTIONS)
def test_copies_and_repr(name, make):
    module = make(name, "triton")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == repr(module)
        assert {part.backend for part in other.modules() if hasattr(part, "backend")} == {"triton"}
    assert list(module.state_dict()) == list(make(name, "auto").state_dict())
    assert repr(module).count("backend='triton'") > 1
    assert "backend" not in repr(make(name, "auto"))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_launches_nothing(name, backend, make, device, launches):
    make(name, backend).to(device)(**sample(name, SIZES, device=device))
    assert not launches
