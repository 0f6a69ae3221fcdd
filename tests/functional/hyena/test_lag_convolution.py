"""Long convolution with a filter of the lag against a double loop, dense and ragged, wherever a sequence stands."""

import pytest
import torch
from clouds import close, gradients
from oracles import beyond, lag_sums

from tg_equiattn.functional.hyena import fft_convolution
from tg_equiattn.functional.hyena.lag_convolution import first_lag, lag_convolution

B, C = 3, 2
MODES = ("linear", "causal")
SHAPES = {"scalars": (), "vectors": (3,)}
LENGTHS = {1: (1, 0, 1), 8: (8, 5, 3), 11: (11, 1, 6), 13: (4, 9, 0)}


def convolve(x, h, lengths=None, mode="linear"):
    return lag_convolution(x, h, lengths, first_lag(x.shape[1], mode == "causal"))


def inputs(kind, n, mode, dtype=torch.float64, count=B):
    x = torch.randn(count, n, C, *SHAPES[kind], dtype=dtype)
    return x.requires_grad_(), torch.randn(max(0, n - first_lag(n, mode == "causal")), C, dtype=dtype).requires_grad_()


def by_definition(x, h, own, mode):
    """Sequence by sequence, zero beyond their lengths."""
    n, out = x.shape[1], []
    for b, size in enumerate(own):
        y = lag_sums(x[b, :size], h, first_lag(n, mode == "causal"))
        out.append(torch.cat([y, y.new_zeros(n - size, *x.shape[2:])]))
    return torch.stack(out)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SHAPES)
def test_equals_the_definition(kind, mode, n, ragged, device):
    """NaN beyond the own lengths is never read."""
    x, h = inputs(kind, n, mode)
    own = LENGTHS[n] if ragged else (n,) * B
    lengths, holes = torch.tensor(own, device=device) if ragged else None, beyond(x, own)
    out, wanted = convolve(holes.to(device), h.to(device), lengths, mode).cpu(), by_definition(x, h, own, mode)
    close([out], [wanted])
    torch.testing.assert_close(gradients([out], (holes, h)), gradients([wanted], (x, h)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("mode", "shape"), [("linear", (3, 512, 2, 3)), ("causal", (30, 13, 18))])
def test_blocks_change_nothing(mode, shape, monkeypatch):
    """More numbers than are transformed at a time."""
    n, c = shape[1:3]
    x, h = torch.randn(shape).double().requires_grad_(), torch.randn(n - first_lag(n, mode == "causal"), c) / n
    h, found = h.double().requires_grad_(), []
    lengths = None if mode == "linear" else torch.arange(shape[0]) % (n + 1)
    for numbers in (fft_convolution.BLOCK_NUMBERS, 1 << 12):
        monkeypatch.setattr(fft_convolution, "BLOCK_NUMBERS", numbers)
        out = convolve(x, h, lengths, mode)
        found.append([out, *gradients([out], (x, h))])
    assert len(fft_convolution.blocks(torch.ones(shape), 2 * n)) > 3
    close(*found)


def test_operators_registered():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for lengths in (None, torch.tensor([5, 2, 0])):
        x, y, h = (torch.randn(s).double().requires_grad_() for s in ((3, 5, 2, 3), (3, 5, 2, 3), (9, 2)))
        operators = torch.ops.tg_equiattn
        torch.library.opcheck(operators.lag_convolution.default, (x, h, lengths, -4), test_utils=checks)
        torch.library.opcheck(operators.lag_correlation.default, (y, x, lengths, -4, 9), test_utils=checks)


def test_saves_its_inputs_only():
    saved, (x, h) = [], inputs("vectors", 997, "linear", torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        convolve(x, h)
    assert sum(saved) <= x.numel() + h.numel()


@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 5])], ids=["equal", "ragged"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_of_gradients(kind, mode, lengths):
    x, h = inputs(kind, 5, mode, count=2)
    assert torch.autograd.gradcheck(lambda x, h: convolve(x, h, lengths, mode), (x, h), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x, h: convolve(x, h, lengths, mode), (x, h), fast_mode=True)


@pytest.mark.parametrize("kind", SHAPES)
def test_mapped(kind):
    x, h = (t.detach() for t in inputs(kind, 7, "linear"))
    got = torch.vmap(lambda x: convolve(x, h))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(got, torch.stack([convolve(x, h), 2 * convolve(x, h)]), rtol=1e-12, atol=1e-12)
