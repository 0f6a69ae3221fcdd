"""Long convolutions of scalars, vectors and by any bilinear product against double loops, dense and ragged."""

import itertools

import pytest
import torch
from clouds import close, gradients
from functorch.compile import make_boxed_func
from oracles import beyond, long_convolution
from torch._dynamo.backends.common import aot_autograd

from tg_equiattn.functional import scalar_long_conv, vector_long_conv
from tg_equiattn.functional.hyena import fft_convolution as transforms
from tg_equiattn.functional.hyena.fft_convolution import fast_length, fft_convolution, is_smooth
from tg_equiattn.functional.hyena.long_conv import MODES, bilinear_long_conv

B, C = 3, 2
SAME_LENGTH = ("circular", "causal")
KINDS = {"scalar": scalar_long_conv, "vector": vector_long_conv}
LENGTHS = {1: (1, 0, 1), 2: (2, 1, 0), 7: (7, 0, 1), 8: (8, 5, 3), 11: (11, 1, 6), 13: (4, 9, 0)}


def inputs(kind, n, dtype=torch.float64, device=None, count=B):
    shape = (count, n, C) if kind == "scalar" else (count, n, C, 3)
    return tuple(torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(2))


def compare(out, wanted, inputs):
    """With gradients."""
    close([out.cpu()], [wanted])
    got, expected = (gradients([x.cpu()], inputs) for x in (out, wanted))
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition(kind, mode, n, ragged, device):
    """NaN beyond the own lengths is never read."""
    q, k = inputs(kind, n)
    own = LENGTHS[n] if ragged else (n,) * B
    lengths = torch.tensor(own, device=device) if ragged else None
    holes = [beyond(x, own) for x in (q, k)]
    out = KINDS[kind](*(x.to(device) for x in holes), lengths, mode).cpu()
    wanted = long_convolution(q, k, own, mode)
    close([out], [wanted])
    torch.testing.assert_close(gradients([out], holes), gradients([wanted], (q, k)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n", [1, 8, 11])
@pytest.mark.parametrize("mode", SAME_LENGTH)
@pytest.mark.parametrize("norm", ["ortho", "backward"])
def test_norms(norm, mode, n):
    """At lengths that the FFT is fast at and others, ragged and not, by numbers, vectors and any product."""
    for own in ((n,) * B, LENGTHS[n]):
        lengths = None if own == (n,) * B else torch.tensor(own)
        for kind in KINDS:
            q, k = inputs(kind, n)
            out, wanted = fft_convolution(q, k, lengths, mode, norm), long_convolution(q, k, own, mode, norm=norm)
            compare(out, wanted, (q, k))
        q, k = inputs("scalar", n)
        out = bilinear_long_conv(q, k, torch.mul, lengths, mode, norm)
        close([out], [fft_convolution(q, k, lengths, mode, norm)])


@pytest.mark.parametrize(
    ("kind", "mode", "shape"),
    [
        ("vector", "circular", (3, 512, 2, 3)),  # blocks of one channel and of 2 and 1 sequences
        ("scalar", "causal", (30, 13, 18)),  # blocks of 5, 5, 5 and 3 channels
    ],
)
def test_blocks_change_nothing(kind, mode, shape, monkeypatch):
    """More numbers than are transformed at a time."""
    n = shape[1]
    q, k = (torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(2))
    lengths = None if mode == "circular" else torch.arange(shape[0]) % (n + 1)
    found = []
    for numbers in (transforms.BLOCK_NUMBERS, 1 << 12):
        monkeypatch.setattr(transforms, "BLOCK_NUMBERS", numbers)
        out = KINDS[kind](q, k, lengths, mode)
        found.append([out, *gradients([out], (q, k))])
    assert len(transforms.blocks(torch.ones(shape), n if mode == "circular" else 2 * n)) == 4
    close(*found)


def test_fast_lengths():
    assert [fast_length(n) for n in (1, 2, 3, 11, 13, 22, 97, 128)] == [2, 2, 4, 12, 14, 24, 98, 128]
    assert [n for n in range(1, 23) if not is_smooth(n)] == [11, 13, 17, 19, 22]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_convolve(kind, mode):
    for count, n in ((0, 5), (3, 0), (0, 0)):
        q, k = inputs(kind, n, count=count)
        for own in (None, torch.zeros(count, dtype=torch.int64)):
            out = KINDS[kind](q, k, own, mode)
            assert out.shape[:3] == (count, max(0, 2 * n - 1) if mode == "linear" else n, C)
            out.sum().backward()
    assert not KINDS[kind](*inputs(kind, 5), torch.zeros(B, dtype=torch.int64), mode).any()


def test_operator_registered():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    operator = torch.ops.tg_equiattn.fft_convolution.default
    cases = itertools.product(((3, 5, 2), (3, 5, 2, 3)), (None, torch.tensor([5, 2, 0])), (False, True))
    for shape, lengths, correlate in cases:
        a, b = (torch.randn(shape).double().requires_grad_() for _ in range(2))
        torch.library.opcheck(operator, (a, b, lengths, "circular", correlate, "ortho"), test_utils=checks)


def test_saves_its_inputs_only():
    saved = []
    q, k = (torch.randn(2, 997, 3, 3).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        vector_long_conv(q, k)
    assert sum(saved) <= q.numel() + k.numel()


class Product(torch.nn.Module):
    """A bilinear map of C and D numbers to E."""

    def __init__(self, c=2, d=3, e=5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(c, d, e, dtype=torch.float64))

    def forward(self, a, b):
        return torch.einsum("...c,...d,cde->...e", a, b, self.weight)


@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("n", [1, 11])
@pytest.mark.parametrize("mode", SAME_LENGTH)
def test_bilinear_equals_the_definition(mode, n, ragged, block, device):
    """In one block of frequencies, and in many."""
    q, k = (torch.randn(B, n, c, dtype=torch.float64, requires_grad=True) for c in (2, 3))
    product, own = Product(), LENGTHS[n] if ragged else (n,) * B
    expected = long_convolution(q, k, own, mode, product)
    wanted = gradients([expected], (q, k, product.weight))
    lengths = torch.tensor(own, device=device) if ragged else None
    out = bilinear_long_conv(q.to(device), k.to(device), product.to(device), lengths, mode, block=block)
    close([out.cpu()], [expected])
    torch.testing.assert_close(
        [x.cpu() for x in gradients([out], (q, k, product.weight))], list(wanted), rtol=1e-11, atol=1e-12
    )


def test_bilinear_of_nothing():
    for b, n in ((0, 5), (3, 0), (0, 0)):
        for mode in SAME_LENGTH:
            out = bilinear_long_conv(torch.ones(b, n, 2).double(), torch.ones(b, n, 3).double(), Product(), None, mode)
            assert out.shape == (b, n, 5)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("mode", SAME_LENGTH)
def test_as_compilers_for_accelerators_are_given_it(mode, ragged, monkeypatch):
    """The operator's numbers and derivatives, in operations of torch that are seen."""
    monkeypatch.setattr(transforms, "compiler_fuses", lambda x, _: torch.compiler.is_compiling())
    lengths, seen = torch.tensor(LENGTHS[11]) if ragged else None, []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    for kind in ("scalar", "vector"):
        torch._dynamo.reset()
        compiled = torch.compile(fft_convolution, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
        q, k = inputs(kind, 11)
        compare(
            compiled(q, k, lengths, mode), long_convolution(q, k, LENGTHS[11] if ragged else (11,) * B, mode), (q, k)
        )
    assert not any("tg_equiattn" in str(target) for target in seen)
    assert sum("_fft_r2c" in str(target) for target in seen) >= 4
