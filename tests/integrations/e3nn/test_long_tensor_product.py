"""LongTensorProduct against the sum over all pairs of e3nn's tensor product."""

import pytest
import torch
from e3nn import o3
from space import batch_of
from tg_equiattn.integrations.e3nn import LongTensorProduct

MODES = ["circular", "causal"]
FULL = ("2x0e+3x1o+1x2e", "1x0o+2x1e+1x3o", "2x1o+1x2o+2x0e")
EQUAL, WIDER = ("3x0e+3x1o", "3x0e+3x1o", "3x0e+3x1e+3x1o"), ("3x0e+2x1o", "5x0e+1x1o", "3x0e+2x1o+2x1e")
UUU = [(0, 0, 0, "uuu", True), (1, 1, 1, "uuu", False), (0, 1, 2, "uuu", True, 0.3), (1, 1, 0, "uuu", True)]
UVU = [(0, 0, 0, "uvu", True), (1, 1, 2, "uvu", True), (1, 0, 1, "uvu", True), (1, 1, 0, "uvw", True)]
CASES = {"full": (FULL, None), "uuu": (EQUAL, UUU), "uvu": (WIDER, UVU)}
SIZES = 7, 1, 13, 2, 11


def sum_over_pairs(product, x1, x2, weight, sizes, mode):
    """u_i = 1/n sum_j x1_j (x) x2_{i-j}, pair by pair."""
    out = []
    for a, b in zip(x1.split(sizes), x2.split(sizes), strict=True):
        n = len(a)
        i, j = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
        if mode == "causal":
            i, j = i[i >= j], j[i >= j]
        pairs = product(a[j], b[(i - j) % n], weight)
        out.append(pairs.new_zeros(n, pairs.shape[1]).index_add(0, i, pairs) / n)
    return torch.cat(out)


def inputs(conv, nodes):
    return [irreps.randn(nodes, -1).requires_grad_() for irreps in (conv.irreps_in1, conv.irreps_in2)]


@pytest.mark.parametrize(
    ("case", "mode", "sizes"),
    [
        *((case, mode, SIZES) for case in CASES for mode in MODES),
        ("uuu", "circular", (12,)),
        ("uvu", "causal", (17,)),
        ("full", "circular", (5, 5, 5)),
    ],
)
def test_equals_the_sum_over_pairs(case, mode, sizes, double, device, randomise, equal):
    irreps, instructions = CASES[case]
    conv = randomise(LongTensorProduct(*irreps, instructions=instructions, causal=mode == "causal"))
    if instructions is None:
        oracle = o3.FullyConnectedTensorProduct(*irreps, internal_weights=False)
    else:
        oracle = o3.TensorProduct(*irreps, instructions, internal_weights=False, shared_weights=True)
    x1, x2 = inputs(conv, sum(sizes))
    weight = conv.tensor_product.weight.detach().clone().requires_grad_()
    wanted = sum_over_pairs(oracle, x1, x2, weight, sizes, mode)
    conv = conv.to(device)
    batch = batch_of(sizes).to(device) if len(sizes) > 1 else None
    got = conv(x1.to(device), x2.to(device), batch).cpu()
    equal(got, wanted)
    direction = torch.randn_like(wanted)
    got_grads = torch.autograd.grad((got * direction).sum(), [x1, x2, conv.tensor_product.weight])
    wanted_grads = torch.autograd.grad((wanted * direction).sum(), [x1, x2, weight])
    for a, b in zip(got_grads, wanted_grads, strict=True):
        equal(a.cpu(), b)


@pytest.mark.parametrize(
    "irreps",
    [FULL, ("1x0e+1x3o", "2x2e+1x0o+1x2e", "1x0e+1x1o+1x5o+2x4e"), ("2x1o", "1x1e", "1x0e+1x1o+3x2o")],
)
def test_paths_are_e3nns(irreps):
    conv, wanted = LongTensorProduct(*irreps), o3.FullyConnectedTensorProduct(*irreps)
    assert conv.instructions == wanted.instructions
    assert conv.weight_numel == wanted.weight_numel


def test_no_nodes(randomise):
    conv = randomise(LongTensorProduct(*FULL))
    x1, x2 = inputs(conv, 0)
    for batch in (None, torch.zeros(0, dtype=torch.int64)):
        assert conv(x1, x2, batch).shape == (0, conv.irreps_out.dim)
    assert conv(x1, x2, batch, batch_size=3).shape == (0, conv.irreps_out.dim)


@pytest.mark.parametrize("irreps", [("4x0e", "0x1o", "2x1o"), ("3x0e+1x2e", "2x2o", "0x2o")])
def test_multiplicity_zero_gives_zeros(irreps):
    conv = LongTensorProduct(*irreps)
    out = conv(*(part.randn(6, -1) for part in (conv.irreps_in1, conv.irreps_in2)))
    assert out.shape == (6, conv.irreps_out.dim)
    assert not out.any()
