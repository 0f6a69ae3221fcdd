"""Every module under autocast and TF32, on the devices there are; flags stay the user's."""

import contextlib

import pytest
import torch
from cases import CASES, ONE_A_NAME, moved, run
from small_groups import GROUPS

from tg_equiattn.nn import GroupAttention
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
            torch.testing.assert_close(a.detach().float(), b.detach(), rtol=0, atol=0.1 * scale)


@pytest.mark.parametrize("name", ["C4", "D4"])
def test_group_attention_under_tf32(name, randomise, device):
    """Equivariant up to the last projection, whose operands are sums in an order of the element's own."""
    layer = randomise(GroupAttention(GROUPS[name], 3, 7, heads=2, kernel_size=3)).to(device)
    layer.out.forward = lambda x: x
    with tf32():
        x = torch.randn(2, 3, len(GROUPS[name]), 5, 6, device=device)
        assert equivariance_error(layer, GROUPS[name], x) <= 1e-5
