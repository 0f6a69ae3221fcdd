"""TensorProductHyenaOperator against a slow evaluation, node by node and pair by pair; chains among zeros."""

import pytest
import torch
from e3nn import o3
from oracles import implicit_sums, in_chains, sequence_convolution, taps
from space import batch_of
from tg_equiattn.integrations.e3nn import IrrepsSE3Hyena, LongTensorProduct, TensorProductHyenaOperator

IRREPS = "3x0e+2x1o+1x2e", "2x0e+1x2e+1x1o", "2x0e+3x1o+1x2e+1x0e"
PARITIES = "2x0e+1x0o+2x1o+1x1e", "1x0e+2x1o+1x1e", "3x0e+2x0o+3x1o+2x1e"
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "short_conv": 3},
    "implicit short": {"filter": "implicit", "short_conv": 3},
    "implicit causal": {"filter": "implicit", "causal": True, "short_conv": 3},
    "exponential causal": {"filter": "exponential", "causal": True, "short_conv": 3},
}


def channels(irreps):
    """Which of its irreps each column of a feature belongs to, every copy counted."""
    sizes = [ir.dim for mul, ir in irreps for _ in range(mul)]
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def normed(x, irreps):
    """Irreps of every node by themselves, divided by the root of 0.1 plus their mean square."""
    out = torch.zeros_like(x)
    for part in irreps.slices():
        for node in range(len(x)):
            out[node, part] = x[node, part] / (0.1 + (x[node, part] ** 2).mean()) ** 0.5
    return out


def by_definition(module, x, pos, index=None, chain=None):
    hidden, n = module.irreps_hidden, len(x)
    index = torch.arange(n) if index is None else index
    chain = torch.zeros(n).long() if chain is None else chain
    projected = normed(module.project(torch.cat([x, pos - pos.mean(0)], 1)), hidden + hidden + hidden)
    if module.short_conv is not None:
        weight = module.short_conv.weight[channels(hidden + hidden + hidden)]
        projected = in_chains(
            lambda x, index: taps(x, weight, module.short_conv.causal, index), index, chain, projected
        )
    query, key, value = projected.chunk(3, 1)
    if module.implicit_filter is not None:
        sums = lambda key, index: implicit_sums(module.implicit_filter, key, index, channels(hidden))  # noqa: E731
        mixed = module.tensor_product(query, in_chains(sums, index, chain, key))
    else:
        conv = module.convolution
        mixed = in_chains(
            lambda q, k, index: sequence_convolution(q, k, index, conv.mode, conv.tensor_product, conv.norm),
            index, chain, query, key,
        )  # fmt: skip
    mixed = normed(mixed, hidden)
    parts = [mixed[:, p].reshape(n, mul, ir.dim) for (mul, ir), p in zip(hidden, hidden.slices(), strict=True)]
    gates = [columns.square().sum(-1) for columns in parts]
    scalars = [c[:, :, 0] for c, (_, ir) in zip(parts, hidden, strict=True) if ir == o3.Irrep("0e")]
    gate = torch.sigmoid(module.gate(torch.cat([*gates, *scalars], 1)))
    own = gate.split([columns.shape[1] for columns in parts], 1)
    gated = torch.cat([(columns * g[..., None]).flatten(1) for columns, g in zip(parts, own, strict=True)], 1)
    return module.out(normed(module.shortcut(x) + module.multiply(gated, value), hidden))


def in_the_gate(*names):
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]


@pytest.mark.parametrize("name", in_the_gate("plain", "implicit causal"))
def test_equals_the_definition(name, double, device, randomise, equal):
    module = randomise(TensorProductHyenaOperator(*IRREPS, **OPTIONS[name]))
    for n in (1, 2, 5):
        x, pos = module.cpu().irreps_in.randn(n, -1), torch.randn(n, 3)
        pos = torch.zeros(n, 3) if module.options.causal else pos
        wanted = by_definition(module, x, pos)
        direction, weights = torch.randn_like(wanted), [p for p in module.parameters() if p.numel()]
        expected = torch.autograd.grad((wanted * direction).sum(), weights)
        out = module.to(device)(x.to(device), None if module.options.causal else pos.to(device)).cpu()
        equal(out, wanted)
        assert out.is_contiguous()
        for a, b in zip(torch.autograd.grad((out * direction).sum(), weights), expected, strict=True):
            equal(a.cpu(), b.cpu(), 1e-11)


@pytest.mark.parametrize("name", in_the_gate("causal", "implicit short"))
def test_gaps_and_chains_equal_the_definition(name, double, randomise, equal):
    module = randomise(TensorProductHyenaOperator(*IRREPS, **OPTIONS[name]))
    x, pos = module.irreps_in.randn(11, -1), torch.zeros(11, 3) if module.options.causal else torch.randn(11, 3)
    index, chain = torch.tensor([3, 0, 4, 2, 9, 3, 10, 13, 4, 14, 19]), torch.tensor([5, 2, 5, 2, 5, 2, 5, 5, 2, 5, 2])
    wanted = by_definition(module, x, pos, index, chain)
    given = {"pos": None if module.options.causal else pos, "index": index, "chain": chain}
    equal(module(x, **given), wanted)
    equal(module(x, **given, num_chains=3, max_num_nodes=29), wanted)
    assert (module(x, **given | {"index": None}) - wanted).abs().max() > 1e-3
    assert (module(x, **given | {"index": torch.arange(11), "chain": None}) - wanted).abs().max() > 1e-3


def test_long_tensor_product_with_gaps_and_chains(double, randomise, equal):
    conv = randomise(LongTensorProduct("2x0e+1x1o", "1x0e+1x1o", "1x0e+2x1o+1x1e", causal=True))
    x1, x2, batch = torch.randn(11, 5), torch.randn(11, 4), batch_of([7, 4])
    index, chain = torch.tensor([1, 3, 4, 0, 8, 9, 2, 7, 9, 1, 30]), torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0])
    sums = lambda a, b, index: sequence_convolution(a, b, index, "causal", conv.tensor_product, "forward")  # noqa: E731
    wanted = in_chains(sums, index, chain + 2 * batch, x1, x2)
    equal(conv(x1, x2, batch, index=index, chain=chain), wanted)


STEPS = {"filter": "exponential", "causal": True}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorProductHyenaOperator(*IRREPS, short_conv=3, **STEPS),
        lambda: TensorProductHyenaOperator(*IRREPS, **STEPS),
        lambda: IrrepsSE3Hyena(*PARITIES, num_layers=2, attn_kwargs={"short_conv": 3, **STEPS}),
    ],
)
def test_steps_equal_the_convolution(make, double, randomise):
    """Node by node, of two sequences."""
    module = randomise(make(), 0.5)
    x = module.irreps_in.randn(2, 17, -1)
    wanted = module(x.flatten(0, 1), batch=batch_of([17, 17])).unflatten(0, (2, 17))
    state, outs = None, []
    for t in range(17):
        state, out = module.step(state, x[:, t])
        outs.append(out)
    assert (torch.stack(outs, 1) - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_steps_need_a_filter_that_is_a_recurrence():
    with pytest.raises(ValueError, match="filter must be 'exponential' for step, got 'implicit'"):
        TensorProductHyenaOperator(*IRREPS, filter="implicit", causal=True).step(None, torch.ones(2, 14))


def test_rings_begin_anywhere(double, randomise, equal):
    module = randomise(TensorProductHyenaOperator(*IRREPS, filter="implicit", short_conv=3))
    x, pos = module.irreps_in.randn(11, -1), torch.randn(11, 3)
    wanted = module(x, pos, ring=True).roll(4, 0)
    equal(module(x.roll(4, 0), pos.roll(4, 0), ring=True), wanted)
    assert (module(x.roll(4, 0), pos.roll(4, 0)) - wanted).abs().max() > 1e-3
    with pytest.raises(ValueError, match="ring must be None with filter='data'"):
        TensorProductHyenaOperator(*IRREPS)(x, pos, ring=True)
