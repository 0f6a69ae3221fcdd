"""The fused geometric product against the torch path and Pauli matrices, outputs and gradients."""

import pytest
import torch
from kernel_builds import resources
from oracles import grade, grade_paths, pauli_product
from space import error, motion, move_multivectors

from tg_equiattn.functional import backend as backends
from tg_equiattn.functional.hyena.clifford import channelwise_product, geometric_product
from tg_equiattn.testing import TOLERANCE

kernels = pytest.importorskip("tg_equiattn.functional.hyena.triton_clifford", reason="Triton is not installed")


pytestmark = pytest.mark.usefixtures("kernels_run")


def factors(channels, tokens, dtype=torch.float64, device="cpu"):
    """x, y, weights by path, and a direction of the product."""
    shapes = [(8, channels, tokens)] * 2 + [(20, channels), (8, channels, tokens)]
    return [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]


def differentiated(function, inputs, direction):
    """The product and its gradients; inputs as they lie in memory."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, direction)


def fused(x, y, weight):
    return channelwise_product(x, y, weight, "triton")


def in_torch(x, y, weight):
    return channelwise_product(x, y, weight, "torch")


def by_definition(x, y, weight):
    """Each grade path by itself, from products of Pauli matrices."""
    x, y = (z.permute(1, 2, 0) for z in (x, y))
    paths = zip(weight, grade_paths(), strict=True)
    out = sum(w[:, None, None] * grade(pauli_product(grade(x, i), grade(y, k)), j) for w, (i, k, j) in paths)
    return out.permute(2, 0, 1)


def close(got, wanted, tolerance=1e-10):
    """Relative to the largest value of each."""
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        scale = float(b.detach().abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("channels", "tokens"), [(1, 1), (3, 7), (2, 41)])
def test_equals_the_definition(channels, tokens, device):
    *inputs, direction = factors(channels, tokens)
    wanted = differentiated(by_definition, inputs, direction)
    got = differentiated(fused, [x.to(device) for x in inputs], direction.to(device))
    close([x.cpu() for x in got], wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("channels", "tokens"), [(1, 13), (2, 601), (1, 1024), (5, 1)])
def test_equals_torch(channels, tokens, dtype, device):
    """In one block of tokens, and in several, the last full or not: of 512 tokens, 256 of float64."""
    *inputs, direction = factors(channels, tokens, dtype, device)
    close(differentiated(fused, inputs, direction), differentiated(in_torch, inputs, direction), TOLERANCE[dtype])


@pytest.mark.parametrize(("channels", "tokens"), [(3, 0), (0, 5), (0, 0)])
def test_nothing_to_multiply(channels, tokens, device):
    *inputs, direction = factors(channels, tokens, device=device)
    out, *grads = differentiated(fused, inputs, direction)
    assert out.shape == direction.shape
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    assert not grads[2].any()
    for x, y, shape in [((0, 8), (5, 1, 8), (5, 0, 8)), ((8,), (0, 8), (0, 8))]:
        assert (
            geometric_product(torch.ones(x, device=device), torch.ones(y, device=device), backend="triton").shape
            == shape
        )


def test_any_strides(device):
    """Tokens, channels or components along memory, gaps, nothing but one value; gradients' too."""
    by_token = torch.randn(11, 3, 8, dtype=torch.float64, device=device).permute(2, 1, 0)
    by_channel = torch.randn(8, 22, 6, dtype=torch.float64, device=device)[:, ::2, ::2].transpose(1, 2)
    weight = torch.randn(3, 40, dtype=torch.float64, device=device).T[::2]
    flipped = torch.randn(3, 8, 11, dtype=torch.float64, device=device).transpose(0, 1)
    one = torch.randn((), dtype=torch.float64, device=device).expand(8, 3, 11)
    for x, y, direction in [(by_token, by_channel, one), (by_channel, one, by_token), (one, by_token, flipped)]:
        assert not x.is_contiguous()
        wanted = differentiated(in_torch, [z.contiguous() for z in (x, y, weight)], direction.contiguous())
        close(differentiated(fused, (x, y, weight), direction), wanted)


def test_offsets_beyond_32_bits(tmp_path, device):
    """Components, channels or tokens so far apart, in a file of which a few pages exist."""
    if device != "cpu":
        pytest.skip("a sparse file is on the CPU")
    far = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**31 + 2**20, dtype=torch.bfloat16)
    *_, weight, _ = factors(3, 3)
    for size, stride in (((8, 1, 3), (2**31 // 7 + 5, 1, 1)), ((8, 3, 2), (2, 2**30, 1)), ((8, 1, 3), (1, 1, 2**30))):
        x = far.as_strided(size, stride)
        x.copy_(torch.randn(size))
        y, w = torch.randn(size).bfloat16(), weight[:, : size[1]].bfloat16()
        assert max((n - 1) * gap for n, gap in zip(size, stride, strict=True)) >= 2**31
        close([kernels.product(x, y, w)], [in_torch(x.float(), y.float(), w.float()).bfloat16()], 1e-2)
        grads = kernels.gradients(y, x, y, w), kernels.gradients(y, x.contiguous(), y, w)
        close(*grads, 0)


@pytest.mark.parametrize(("x", "y"), [((5, 1, 3, 8), (2, 3, 8)), ((8,), (7, 8)), ((2, 3, 8), (2, 3, 8)), ((8,), (8,))])
def test_broadcasting(x, y, device):
    inputs = [torch.randn(shape, dtype=torch.float64).to(device) for shape in (x, y)]
    direction = torch.randn_like(inputs[0] * inputs[1])
    wanted = differentiated(lambda x, y: geometric_product(x, y, backend="torch"), inputs, direction)
    got = differentiated(lambda x, y: geometric_product(x, y, backend="triton"), inputs, direction)
    close(got, wanted)
    close([got[0].cpu()], [pauli_product(*(z.cpu() for z in inputs))])


def test_components_along_memory_are_not_copied(device, monkeypatch):
    x, y = torch.randn(2, 5, 7, 8, dtype=torch.float64, device=device)
    seen, product = [], kernels.product
    monkeypatch.setattr(kernels, "product", lambda *rows: seen.extend(z.data_ptr() for z in rows[:2]) or product(*rows))
    out = geometric_product(x, y, backend="triton")
    assert seen == [x.data_ptr(), y.data_ptr()]
    assert out.is_contiguous()


@pytest.mark.parametrize("weighted", [True, False])
def test_gradcheck(weighted, device):
    shapes = [(8, 1, 1)] * 2 + [(20, 1)] if weighted else [(1, 8), (8,)]
    inputs = [torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in shapes]
    function = fused if weighted else lambda x, y: geometric_product(x, y, backend="triton")
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("weighted", [True, False])
def test_second_derivatives_equal_torch(weighted, device):
    """Which are checked against finite differences."""
    *inputs, direction = factors(2, 3, device=device)
    if not weighted:
        *inputs, direction = (x[:, 0].T for x in (*inputs[:2], direction))

    def second(backend):
        leaves = [x.detach().requires_grad_() for x in (*inputs, direction)]
        *factors, along = leaves
        out = channelwise_product(*factors, backend) if weighted else geometric_product(*factors, backend=backend)
        grads = torch.autograd.grad(out, factors, along, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        return torch.autograd.grad(total, leaves)

    close(second("triton"), second("torch"))


@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ops_are_registered_right(weighted):
    """Schema, fake tensors, autograd and dynamic shapes, by torch's own check."""
    x, y, weight, grad = (z.requires_grad_() for z in factors(2, 3))
    weight = weight if weighted else None
    if not backends.INTERPRETED:
        x, y, weight, grad = (None if z is None else z.detach().cuda().requires_grad_() for z in (x, y, weight, grad))
    ops = torch.ops.tg_equiattn
    calls = (ops.clifford_product, (x, y, weight)), (ops.clifford_product_backward, (grad, x, y, weight))
    for op, arguments in calls:
        assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}


def moved_error(x, y, r):
    got = geometric_product(move_multivectors(x, r), move_multivectors(y, r), backend="triton")
    return error(got, move_multivectors(geometric_product(x, y, backend="triton"), r))


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, reflect, device):
    x, y = torch.randn(2, 17, 8, dtype=dtype, device=device)
    assert moved_error(x, y, motion(dtype, reflect, device)) <= TOLERANCE[dtype]


def test_weighted_is_equivariant_and_a_wrong_sign_is_seen(device):
    x, y, weight, _ = factors(2, 17, device=device)
    r = motion(reflect=True, device=device)

    def move(x):
        return move_multivectors(x.movedim(0, -1), r).movedim(-1, 0)

    def broken(function):
        return error(function(move(x), move(y), weight), move(function(x, y, weight)))

    assert broken(fused) <= 1e-10
    assert moved_error(x[:, 0].T, y[:, 0].T, torch.randn_like(r)) > 1e-2
    signs = torch.ones(8, 1, 1, dtype=x.dtype, device=device)
    signs[5] = -1
    assert broken(lambda x, y, weight: signs * fused(x, y, weight)) > 1e-2
    assert broken(lambda x, y, weight: fused(signs * x, y, weight)) > 1e-2


def test_same_in_every_run(device):
    """Also of weights, whose gradients are sums over three blocks."""
    *inputs, direction = factors(2, 1301, torch.float32, device)
    first, second = (differentiated(fused, inputs, direction) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("weighted", [True, False])
def test_compiles_whole(weighted, device):
    *inputs, direction = factors(2, 5, torch.float32, device)
    function = fused
    if not weighted:
        inputs, direction = [x[:, 0].T for x in inputs[:2]], direction[:, 0].T
        function = lambda x, y: geometric_product(x, y, backend="triton")  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    close(differentiated(compiled, inputs, direction), differentiated(function, inputs, direction), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    x, y = torch.randn(2, 17, 8, device=device)
    with torch.autocast(device, dtype):
        single = geometric_product(x, y, backend="triton")
        half, *grads = differentiated(
            lambda x, y: geometric_product(x, y, backend="triton"),
            (x.to(dtype), y.to(dtype)),
            torch.ones_like(x, dtype=dtype),
        )
    close([single], [geometric_product(x, y)], 1e-6)
    assert half.dtype == dtype
    close([half.float()], [geometric_product(x, y)], 3e-2)
    assert all(g.isfinite().all() and g.dtype == dtype for g in grads)


def test_nan_stays_in_its_token(device):
    x, y, weight, _ = factors(2, 7, device=device)
    expected = fused(x, y, weight)
    x[3, 1, 4] = torch.nan
    out = fused(x, y, weight)
    assert out[:, 1, 4].isnan().all()
    there = torch.ones(2, 7, dtype=torch.bool, device=device)
    there[1, 4] = False
    close([out[:, there]], [expected[:, there]], 0)


def test_auto_launches_nothing(device, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("a kernel was launched")

    monkeypatch.setattr(kernels, "product", refuse)
    *inputs, direction = factors(2, 3, device=device)
    x, y = torch.randn(2, 3, 8, device=device)
    for backend in ("auto", "torch"):
        differentiated(lambda *z: channelwise_product(*z, backend), inputs, direction)  # noqa: B023
        geometric_product(x, y, backend=backend)
    with pytest.raises(RuntimeError, match="a kernel was launched"):
        fused(*inputs)
    with pytest.raises(RuntimeError, match="a kernel was launched"):
        geometric_product(x, y, backend="triton")


BUILDS = """
import torch
from tg_equiattn.functional.hyena import triton_clifford as kernels
for dtype in (torch.float32, torch.float64):
    x, y, grad = torch.randn(3, 8, 3, {tokens}, dtype=dtype)
    weight = torch.randn(20, 3, dtype=dtype)
    kernels.product(x, y, weight)
    kernels.gradients(grad, x, y, weight)
    x, y, grad = torch.randn(3, {tokens}, 8, dtype=dtype).transpose(1, 2)[:, :, None]
    kernels.product(x, y, None)
    kernels.gradients(grad, x, y, None)
"""


@pytest.mark.parametrize("tokens", [101, pytest.param(4096, marks=pytest.mark.slow)])
def test_builds_for_a_gpu_without_spilling(tokens):
    built = resources(BUILDS.format(tokens=tokens))
    assert [kernel["name"] for kernel in built] == ["_product", "_gradients"] * 4
    assert all(kernel["spilled"] == 0 and kernel["shared"] <= 1024 for kernel in built)
