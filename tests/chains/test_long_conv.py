"""Long convolutions of scalars, vectors and with filters of the lag against double loops."""

import pytest
import torch
from clouds import close, gradients
from oracles import beyond, lag_sums, long_convolution

from tg_equiattn.chains import long_conv as module
from tg_equiattn.chains.long_conv import lag_convolution, zero_beyond

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

B, C = 3, 2


def first_lag(n, mode):
    return 0 if mode == "causal" else 1 - n


def by_lag(x, h, lengths=None, mode="both sides"):
    """The convolution has its channels first and its tokens last, and reads zeros beyond the own lengths."""
    first = (2, 0, 1) if x.ndim == 3 else (3, 2, 0, 1)
    out = zero_beyond(lag_convolution(zero_beyond(x.permute(first), lengths), h.T), lengths)
    return out.permute((1, 2, 0) if x.ndim == 3 else (2, 3, 1, 0))


def by_data(x, y, lengths=None, mode="circular"):
    """The same for two sequences."""
    first = (2, 0, 1) if x.ndim == 3 else (3, 2, 0, 1)
    a, b = (zero_beyond(z.permute(first), lengths).reshape(-1, *x.shape[:2]) for z in (x, y))
    out = module.long_convolution(a, b, x.shape[2] if x.ndim == 3 else 0, lengths, mode)
    out = zero_beyond(out if x.ndim == 3 else module.split_features(out, 0)[1], lengths)
    return out.permute((1, 2, 0) if x.ndim == 3 else (2, 3, 1, 0))


MODES = ("circular", "causal")
DATA = {"scalar": by_data, "vector": by_data}
KINDS = DATA | {"scalar by lag": by_lag, "vector by lag": by_lag}
CASES = [(kind, mode) for kind in KINDS for mode in (MODES if kind in DATA else ("both sides", "causal"))]
LENGTHS = {1: (1, 0, 1), 7: (7, 0, 1), 8: (8, 5, 3), 11: (11, 1, 6), 13: (4, 9, 0)}


def inputs(kind, n, mode="circular", count=B):
    """Two sequences, or one and a filter of the lag."""
    x = torch.randn(count, n, C, *[3] * ("vector" in kind), dtype=torch.float64)
    y = torch.randn_like(x) if kind in DATA else torch.randn(max(0, n - first_lag(n, mode)), C).double()
    return x.requires_grad_(), y.requires_grad_()


def by_definition(kind, x, y, own, mode):
    if kind in DATA:
        return long_convolution(x, y, own, mode)
    sums = [lag_sums(x[b, :n], y, first_lag(x.shape[1], mode)) for b, n in enumerate(own)]
    return torch.stack([torch.cat([s, s.new_zeros(x.shape[1] - len(s), *s.shape[1:])]) for s in sums])


def compare(out, wanted, inputs, others=None):
    close([out.cpu()], [wanted])
    got, expected = gradients([out.cpu()], inputs), gradients([wanted], others or inputs)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_equals_the_definition(kind, mode, n, ragged, device):
    """NaN beyond the own lengths is never read."""
    x, y = inputs(kind, n, mode)
    own = LENGTHS[n] if ragged else (n,) * B
    lengths = torch.tensor(own, device=device) if ragged else None
    holes = [beyond(x, own), beyond(y, own) if kind in DATA else y]
    out = KINDS[kind](*(x.to(device) for x in holes), lengths, mode)
    compare(out, by_definition(kind, x, y, own, mode), holes, (x, y))


@pytest.mark.parametrize("scalars", [0, 5, 17])
def test_tiles_of_channels_change_nothing(scalars, monkeypatch):
    """Of 17 features, the first of which are scalars and the others components of vectors; two derivatives."""
    features, lengths = scalars + (17 - scalars) // 3 * 3, torch.tensor([13, 4, 0])
    a, b = (torch.randn(features, 3, 13, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def results():
        x, y = zero_beyond(a, lengths), zero_beyond(b, lengths)
        out = zero_beyond(module.long_convolution(x, y, scalars, lengths, "circular"), lengths)
        first = torch.autograd.grad(out.pow(2).sum(), (a, b), create_graph=True)
        return out, *first, *torch.autograd.grad(sum(x.pow(2).sum() for x in first), (a, b))

    wanted = results()
    monkeypatch.setattr(module, "_TILE_NUMBERS", 400)
    torch.testing.assert_close(results(), wanted, rtol=1e-11, atol=1e-11)
