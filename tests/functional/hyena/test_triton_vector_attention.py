"""Fused vector self-attention against all pairs' cross products and torch; interpreted where there is no GPU."""

import kernel_builds
import pytest
import torch
from oracles import cross_product_attention
from space import error, motion, move

from tg_equiattn.functional import vector_attention
from tg_equiattn.testing import TOLERANCE

kernels = pytest.importorskip("tg_equiattn.functional.hyena.triton_vector_attention")

B, N, C = 3, 13, 2


pytestmark = pytest.mark.usefixtures("kernels_run")


def inputs(device, n=N, dtype=torch.float64, count=B, channels=C):
    shape = (count, n, channels, 3)
    return tuple(torch.randn(shape, dtype=dtype).to(device).requires_grad_() for _ in range(3))


def attend(*qkv, lengths=None, backend="triton", **options):
    if lengths is not None:
        lengths = torch.tensor(lengths, device=qkv[0].device)
    return vector_attention(*qkv, lengths, backend=backend, **options)


def with_gradients(out, qkv):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), qkv)


def close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


FULL, PART = (13, 13, 13), (0, 1, 10)


@pytest.mark.parametrize(
    ("scale", "sizes"),
    [
        (None, FULL), (0.0, PART), (70.0, FULL), (0.3, PART),
        *(pytest.param(*kind, marks=pytest.mark.slow) for kind in ((None, PART), (0.0, FULL), (70.0, PART))),
        pytest.param(0.3, FULL, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_equals_the_definition_and_torch(scale, sizes, device):
    """With scores up to several hundred at the largest scale, where exponentials overflow unless stabilised."""
    qkv, options = inputs(device), {"scale": scale}
    lengths = None if min(sizes) == N else sizes
    got = with_gradients(attend(*qkv, lengths=lengths, **options), qkv)
    close(got, with_gradients(cross_product_attention(*qkv, sizes, scale), qkv), 1e-10)
    wanted = with_gradients(attend(*qkv, lengths=lengths, backend="torch", **options), qkv)
    close(got, wanted, 1e-10 if scale != 70.0 else 1e-7)


@pytest.mark.parametrize("scale", [None, pytest.param(0.3, marks=pytest.mark.slow)])
def test_single_precision(scale, device):
    qkv = inputs(device, dtype=torch.float32)
    got = with_gradients(attend(*qkv, scale=scale), qkv)
    assert all(x.dtype == torch.float32 for x in got)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    close(got, with_gradients(cross_product_attention(*exact, (N,) * B, scale), exact), 1e-5)


def test_several_programs(device):
    """A program has 64 queries or keys, and walks over four (eight of float32) at a time: the last ones not full."""
    qkv, sizes = inputs(device, 67, count=2, channels=1), (67, 65)
    got = with_gradients(attend(*qkv, lengths=sizes), qkv)
    close(got, with_gradients(attend(*qkv, lengths=sizes, backend="plain"), qkv), 1e-10)


def test_whatever_lies_beyond_changes_nothing(device):
    qkv, sizes = inputs(device), (5, 0, 13)
    there = (torch.arange(N) < torch.tensor(sizes)[:, None])[..., None, None].to(device)
    holes = [torch.where(there, x.detach(), torch.nan).requires_grad_() for x in qkv]
    got = with_gradients(attend(*holes, lengths=sizes), holes)
    close(got, with_gradients(attend(*qkv, lengths=sizes), qkv), 0)
    assert not any(x.masked_select(~there).any() for x in got)


def test_kernels_do_not_read_beyond(device):
    """The same of the operator itself, whose caller zeroes what is beyond."""
    q, k, v, grad = (torch.randn(3, 2, N, device=device) for _ in range(4))
    lengths, scale = torch.tensor([3, 9], device=device), torch.ones(2, device=device)
    there = torch.arange(N, device=device) < lengths[:, None]

    def run(beyond):
        *qkv, g = (torch.where(there, x, beyond) for x in (q, k, v, grad))
        given = (*qkv, lengths, scale)
        kept = kernels.forward(*given)
        return *kept, *kernels.backward(*given, *kept, g)

    out, peaks, totals, *grads = run(torch.nan)
    close((out, peaks, totals, *grads), run(0.0), 0)
    for x in (out, *grads):
        assert x.any()
        assert not x.masked_select(~there).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, which interprets
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(bad, device):
    qkv = [x.detach() for x in inputs(device)]
    expected = attend(*qkv)
    for n, x in enumerate(qkv):
        x[1, n] = bad
    out = attend(*qkv)
    assert not out[1].isfinite().any()
    close((out[[0, 2]],), (expected[[0, 2]],), 0)


def test_one_token_or_none(device):
    qkv = inputs(device, 1)
    close(
        with_gradients(attend(*qkv), qkv),
        with_gradients(cross_product_attention(*qkv, (1,) * B), qkv),
        1e-12,
    )
    for count, n in ((0, 5), (3, 0), (0, 0)):
        qkv = inputs(device, n, count=count)
        assert [x.shape for x in with_gradients(attend(*qkv), qkv)] == [qkv[0].shape] * 4
    qkv = inputs(device)
    assert not any(x.any() for x in with_gradients(attend(*qkv, lengths=(0, 0, 0)), qkv))


def equivariance_error(function, dtype, reflect, device):
    q, k, v = (x.detach() for x in inputs(device, dtype=dtype))
    r, lengths = motion(dtype, reflect, device), (13, 1, 10)
    wanted = move(function(q, k, v, lengths=lengths), r)
    return error(function(*(move(x, r) for x in (q, k, v)), lengths=lengths), wanted)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, reflect, device):
    assert equivariance_error(attend, dtype, reflect, device) <= TOLERANCE[dtype]


def test_a_wrong_sign_is_seen(device):
    def wrong(q, *rest, **options):
        return attend(q * q.new_tensor([1.0, 1.0, -1.0]), *rest, **options)

    assert equivariance_error(wrong, torch.float64, False, device) > 1e-2


def test_gradcheck(device):
    qkv = inputs(device, 3, count=1, channels=1)
    assert torch.autograd.gradcheck(lambda *t: attend(*t, scale=1.5), qkv, fast_mode=True)


def test_parallel_vectors(device):
    """Scores of zero, whose derivative is zero: also where rounding leaves a little of the cross product."""
    q, _, v = inputs("cpu", dtype=torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (q, 3 * q.double(), v)]  # without any rounding
    wanted = with_gradients(cross_product_attention(*exact, (N,) * B, 1.0), exact)
    rounded = [x.detach().float().to(device).requires_grad_() for x in exact]
    got = with_gradients(attend(*rounded, scale=1.0), rounded)
    close([x.cpu() for x in got], wanted, 1e-5)
    for zeros in ((0,), (1,), (0, 1)):
        given = inputs(device, 5, channels=1)
        qkv = [torch.zeros_like(x) if n in zeros else x for n, x in enumerate(given)]
        qkv = [x.detach().requires_grad_() for x in qkv]
        close(
            with_gradients(attend(*qkv), qkv),
            with_gradients(cross_product_attention(*qkv, (5,) * B), qkv),
            1e-10,
        )


def test_very_large_scores(device):
    qkv = inputs(device, dtype=torch.float32)
    got = with_gradients(attend(*qkv, scale=1e4), qkv)
    assert all(x.isfinite().all() for x in got)
    close(got[:1], (cross_product_attention(*qkv, (N,) * B, 1e4),), 1e-2)


@pytest.mark.parametrize("count", [1, 2])
def test_any_memory_layout(count, device):
    """Also of one sequence, whose channels and tokens become a strided view of groups."""
    qkv = inputs(device, count=count, channels=3 - count)
    wanted = with_gradients(attend(*qkv), qkv)
    other = [x.detach().transpose(0, 2).contiguous().transpose(0, 2) for x in qkv]
    other[1] = torch.stack([other[1], other[0]], -1)[..., 0]
    other = [x.requires_grad_() for x in other]
    assert not any(x.is_contiguous() for x in other)
    close(with_gradients(attend(*other), other), wanted, 0)
    got, wanted = (attend(*qkv, backend=backend).sum() for backend in ("triton", "torch"))
    close(torch.autograd.grad(got, qkv), torch.autograd.grad(wanted, qkv), 1e-10)  # an expanded number's gradient


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_compiles_whole(backend, device):
    qkv = inputs(device, dtype=torch.float32)
    lengths = torch.tensor([7, 13, 0], device=device)
    compiled = torch.compile(vector_attention, fullgraph=True, backend="aot_eager")
    got = with_gradients(compiled(*qkv, lengths, backend=backend), qkv)
    close(got, with_gradients(attend(*qkv, lengths=(7, 13, 0), backend=backend), qkv), 1e-5)


def test_autocast(device):
    qkv = [x.detach().bfloat16().requires_grad_() for x in inputs(device, dtype=torch.float32)]
    full = [x.detach().float().requires_grad_() for x in qkv]
    with torch.autocast(device, torch.bfloat16):
        got = with_gradients(attend(*qkv), qkv)
    close(got, with_gradients(attend(*full), full), 1e-2)


def test_operators_registered(device):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    q, k, v = (torch.randn(3, 2, 5, device=device).requires_grad_() for _ in range(3))
    lengths, scale = torch.tensor([5, 3], device=device), torch.ones(2, device=device)
    operator = torch.ops.tg_equiattn.fused_vector_attention.default
    torch.library.opcheck(operator, (q, k, v, lengths, scale), test_utils=checks)


def test_second_derivatives(device):
    qkv = inputs(device, 3, count=2, channels=1)
    assert torch.autograd.gradgradcheck(lambda *t: attend(*t, lengths=(3, 2)), qkv, fast_mode=True)


def test_memory_does_not_grow_with_pairs(device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attend(*inputs(device, 29, count=1))
    assert 0 < max(saved) <= 3 * 29 * C


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_which_backend_launches(backend, device, monkeypatch):
    launched, right = [], kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *given: launched.append(given) or right(*given))
    vector_attention(*inputs(device), backend=backend)
    assert len(launched) == (backend == "triton")
    if backend == "auto":
        vector_attention(*inputs(device))
        assert not launched


def test_builds_for_a_gpu():
    """As launched, with nothing spilled to memory."""
    code = """if True:
        import torch
        from tg_equiattn.functional import vector_attention
        for dtype in (torch.float32, torch.float64):
            qkv = torch.randn(3, 2, 100, 2, 3, dtype=dtype).requires_grad_()
            vector_attention(*qkv, backend="triton").sum().backward()
    """
    built = kernel_builds.resources(code)
    assert [kernel["name"] for kernel in built] == ["_forward", "_backward_query", "_backward_key"] * 2
    for kernel in built:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= kernel_builds.SHARED_MEMORY, kernel
