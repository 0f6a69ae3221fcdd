"""Every module under autocast and TF32, on the devices there are; flags stay the user's. And TF32 emulated, which
rounds operands of float32 products to 10 bits: geometry stays exact."""

import contextlib

import pytest
import torch
from cases import CASES, FIRST, ONE_A_NAME, moved, run
from ewald import attend
from group_layers import GROUPS
from tf32 import Tf32, round_to_tf32

from tg_equiattn.chains.vector_attention import vector_attention
from tg_equiattn.functional import Gaussian
from tg_equiattn.grids import Window
from tg_equiattn.group.encodings import rotated_offsets
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention, LiftingAttention
from tg_equiattn.testing import equivariance_error


@pytest.fixture(params=ONE_A_NAME)
def built(request, device):
    """Made anew, and alike; variants of a name are slow: they convert numbers where its first case does."""
    pytest.importorskip(CASES[request.param].host)

    def built():
        torch.manual_seed(1)
        module, inputs = CASES[request.param].build(torch.float32)
        return module.to(device), moved(inputs, device)

    return built


def flags():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cuda")


@contextlib.contextmanager
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_autocast_and_flags(built, device):
    """Finite, gradients too, and near float32; neither forward nor backward changes precision or autocast."""

    def found(context):
        with context:
            before = flags()
            out = run(*built())
            assert flags() == before
        return out

    expected, _ = found(contextlib.nullcontext())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype):
            got, grads = found(tf32() if dtype == torch.bfloat16 else contextlib.nullcontext())
        assert all(bool(x.isfinite().all()) for x in (*got, *grads) if x is not None)
        for a, b in zip(got, expected, strict=True):
            scale = max(1e-3, float(b.detach().abs().max())) if b.numel() else 1.0
            tolerance = 20 * torch.finfo(dtype).eps * scale
            torch.testing.assert_close(a.detach().float(), b.detach(), rtol=0, atol=tolerance)


WHOLE = {"RandomFeatures", "MeanReadout"}  # has no input, and is part of a model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in FIRST if name not in WHOLE])
def test_half_precision_outside_of_autocast(name, dtype):
    """Layers with parameters refuse it, whatever the host."""
    pytest.importorskip(CASES[name].host)
    module, inputs = CASES[name].build(dtype)
    if any(True for _ in module.parameters()):
        with pytest.raises(ValueError, match="must be float32 or float64"):
            module(**inputs)


def relative(got, wanted):
    return float((got - wanted).detach().abs().max() / wanted.detach().abs().max())


KERNELS = {"lifting": 3, "group": 3, "ge_vit": 3, "global": None}


@pytest.mark.parametrize(("name", "kind"), [*(("D4", kind) for kind in KERNELS), ("C4", "group")])
def test_attention_on_lattice_elements_stays_equivariant(name, kind, randomise):
    """Up to the last projection, whose operands are sums that depend on the order of neighbors in their last bit: two
    that rounding tells apart are 2^-11 apart in it. So are weights over all pixels and those of heads without content,
    which meet values in products."""
    group, options = GROUPS[name], {"heads": 2, "kernel_size": KERNELS[kind]}
    if kind in ("ge_vit", "global"):
        options["relation"] = "ge_vit"
    layer = (LiftingAttention if kind == "lifting" else GroupAttention)(group, 3, 7, **options)
    x = torch.randn(2, 3, *([] if kind == "lifting" else [len(group)]), 5, 6)
    plain = randomise(layer)(x)
    with Tf32():
        assert relative(layer(x), plain) > 1e-5  # it is rounded,
        assert equivariance_error(layer, group, x) <= 2**-10
        layer = randomise(type(layer)(group, 3, 7, content_heads=2, **options))
        layer.out.forward = lambda x: x
        most = 2**-10 if kind == "global" else 1e-5
        assert equivariance_error(layer, group, x) <= most  # and equally from every side


@pytest.mark.parametrize(("kernel_size", "shape"), [(5, "square"), (5, "disk"), (None, "square")])
def test_offsets_off_the_lattice_are_exact(kernel_size, shape):
    window, group = Window(2, kernel_size, shape), cyclic(8)
    wanted = rotated_offsets(group.matrices, window.offsets((5, 6)))
    layer = GroupAttention(group, 3, 7, heads=2, kernel_size=kernel_size, window_shape=shape)
    with Tf32():
        assert torch.equal(rotated_offsets(group.matrices, window.offsets((5, 6))), wanted)
        assert torch.equal(layer.offsets((5, 6), torch.device("cpu")), wanted)


ROOT = 31**0.5  # times that, scores are those of scale 1
KINDS = {
    "plain": (lambda q, k: (q, k), 1.0),
    "sharp": (lambda q, k: (q, k), 5.0 * ROOT),
    "all parallel": (lambda q, k: (1e-2 * q + 1, 1e-2 * k + 1), 1.0),
    "large": (lambda q, k: (1e3 * q, 1e-2 * k), 1.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_vector_attention(kind):
    """Lengths of cross products are no differences of rounded products, which cancel for parallel vectors."""
    (change, scale), (q, k, v) = KINDS[kind], torch.randn(3, 2, 3, 31, 3)
    q, k = change(q, k)
    single = [x.requires_grad_() for x in (scale * q, k, v)]
    double = [x.detach().double().requires_grad_() for x in single]
    exact = vector_attention(*double, None)
    direction = torch.randn(2, 3, 31, 3)
    wanted = torch.autograd.grad((exact * direction).sum(), double)
    with Tf32():
        out = vector_attention(*single, None)
        got = torch.autograd.grad((out * direction).sum(), single)
    assert relative(out, exact) < 2e-3
    for a, b in zip(got, wanted, strict=True):
        assert relative(a, b) < 1e-2


@pytest.mark.filterwarnings("ignore:cell of graph 0 is far wider")
@pytest.mark.parametrize("method", ["direct", "ewald"])
def test_places(method):
    """A kernel is far narrower than a cloud is wide: rounded positions would be elsewhere."""
    far = torch.tensor([5.43656, -2.82843, 6.28318])
    pos = torch.stack([0 * far, far, far + torch.tensor([0.07, 0.02, -0.07])])
    kernel = [Gaussian(torch.tensor([[0.08]]), torch.ones(1, 1, 1), ((0.08, 0.08),))]
    more = {"method": method, "cell": None if method == "direct" else 7 * torch.eye(3), "error": 0.01}
    ones = torch.ones(3, 1, 1, 1), torch.ones(3, 1, 1, 1), torch.ones(3, 1, 1)
    wanted = attend(*ones, pos, kernel, **more)
    assert relative(attend(*ones, round_to_tf32(pos), kernel, **more), wanted) > 4e-3
    with Tf32():
        assert relative(attend(*ones, pos, kernel, **more), wanted) < 1e-3
