"""Chains with missing tokens, and several chains in a graph: SE(3)-Hyena and short convolutions against double sums."""

import pytest
import torch
from clouds import S, V, close, dense, gradients, one, permuted, sample
from oracles import token_network
from space import error

from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator

SIZES = [11, 1, 7]
NAMES = ["plain", "causal", "short causal", "implicit", "implicit causal", "implicit causal model", "model", "pooled"]
NAMES += ["exponential", "exponential causal", "local", "attention, short", "attention"]


def chained(name, sizes=SIZES):
    """Graphs of two chains whose tokens come in turn, with gaps; numbers of a chain begin anywhere."""
    x, n = sample(name, sizes), sum(sizes)
    chain = torch.randint(2, (n,))
    return {**x, "chain": 3 - 2 * chain, "index": torch.randint(1, 4, (n,)).cumsum(0) - 5 * chain}


RINGS = "implicit", "implicit bare", "exponential", "attention, short"
EVERY = [*((name, 7, {}) for name in NAMES), *((name, 12, {"ring": True}) for name in RINGS)]
EVERY += [pytest.param(name, 14, {"ring": True}, marks=pytest.mark.slow) for name in RINGS]


@pytest.mark.parametrize(("name", "n", "own"), EVERY)
def test_equals_the_definition(name, n, own, make, device):
    """Double sums over the tokens that are there, with lags in differences of the index, for each chain by itself; in
    rings the shortest way round."""
    layer, x = make(name), chained(name, [n])
    inputs = [x[key].requires_grad_() for key in ("scalars", "vectors", "pos") if key in x] + list(layer.parameters())
    del x["batch"]
    wanted = token_network(layer.module, **x, **own)
    expected = gradients(wanted, inputs)
    out = layer.to(device)(**{key: value.to(device) for key, value in x.items()}, **own)
    close([part.cpu() for part in out], wanted, 1e-10)
    close([g.cpu() for g in gradients(out, inputs)], [g.cpu() for g in expected], 1e-7)
    if name != "attention":
        others = () if own else ("index", "chain")
        plain = layer(**{key: value.to(device) for key, value in x.items() if key not in others})
        assert error([part.cpu() for part in plain], wanted) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_alone_equals_in_a_batch(name, make, on_device):
    """Ragged, with bounds instead of values, and padded."""
    layer, x, most = make(name), chained(name), 40
    wanted = [torch.cat(part) for part in zip(*(layer(**one(x, b)) for b in range(len(SIZES))), strict=True)]
    close(layer(**x), wanted)
    close(layer(**x, batch_size=3, num_chains=7, max_num_nodes=most), wanted)
    padded, there = dense(x, SIZES, 13, 0)
    out = layer(**padded)
    close(out if layer.module.pool else [part[there] for part in out], wanted)


@pytest.mark.parametrize("name", ["implicit bare", "implicit causal"])
def test_missing_tokens_are_zeros(name, make):
    """An operator without biases and short convolution; closed up, the chain is another one."""
    layer, x, there = make(name), sample("causal", [23]), torch.ones(23, dtype=torch.bool)
    there[[4, 5, 6, 7, 13, 20]] = False
    del x["batch"]
    zeros = {key: value * there.view(-1, *[1] * (value.ndim - 1)) for key, value in x.items()}
    wanted = [part[there] for part in layer(**zeros)]
    seen = {key: value[there] for key, value in x.items()}
    assert error(layer(**seen, index=there.nonzero()[:, 0] + 100), wanted) <= 1e-12
    assert error(layer(**seen), wanted) > 1e-4


@pytest.mark.parametrize("name", ["plain", "local", "model", "short causal", "implicit", "pooled", "attention, short"])
def test_order_of_chains_is_only_layout(name, make):
    layer, x = make(name), chained(name, [11])
    other = permuted(x, x["chain"].argsort(descending=True, stable=True))
    back = torch.arange(11) if layer.module.pool else x["chain"].argsort(descending=True, stable=True).argsort()
    close([part[back[: len(part)]] for part in layer(**other)], layer(**x), 1e-11)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_any_integer_type(dtype, make):
    layer, x = make("implicit"), sample("causal", [6])
    index, chain = RISING + 200, TWO
    close(layer(**x, index=index.to(dtype), chain=chain.to(dtype)), layer(**x, index=index, chain=chain), 0)


def rings(name, make):
    """A graph of an open chain and two rings of 8 and 7 tokens, and the order in which both begin elsewhere."""
    x, sizes = sample(name, [20]), [5, 8, 7]
    chain = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    x = {key: value for key, value in x.items() if key != "batch"} | {"chain": chain, "ring": chain > 0}
    p = torch.cat([torch.arange(5), 5 + torch.arange(8).roll(3), 13 + torch.arange(7).roll(-2)])
    return make(name), x, p


@pytest.mark.parametrize("name", ["implicit", "implicit model", "attention, short"])
def test_rings_begin_anywhere(name, make):
    """Outputs turn with the rings, of models too; without rings, and in the open chain, they do not."""
    layer, x, p = rings(name, make)
    wanted = [part[p] for part in layer(**x)]
    assert error(layer(**permuted(x, p)), wanted) <= 1e-11
    assert error(layer(**permuted(x | {"ring": torch.zeros(20, dtype=torch.bool)}, p)), wanted) > 1e-4


@pytest.mark.slow
def test_rings_in_batches(make):
    """Alone, ragged, padded, and compiled without values."""
    layer, x = make("implicit"), sample("implicit", SIZES)
    ring = torch.tensor([True, False, True])[x["batch"]]
    wanted = [one(x | {"ring": ring}, b) for b in range(3)]
    wanted = [torch.cat(part) for part in zip(*(layer(**alone) for alone in wanted), strict=True)]
    close(layer(**x, ring=ring), wanted)
    padded, there = dense(x | {"ring": ring}, SIZES, 13, 0)
    close([part[there] for part in layer(**padded)], wanted)
    step = torch.compile(lambda x: layer(**x), fullgraph=True, backend="eager")
    close(step(x | {"ring": ring, "batch_size": 3, "max_num_nodes": 40}), wanted)


TOKENS = {"scalars": torch.ones(6, S), "vectors": torch.ones(6, V, 3)}
RISING, TWO = torch.tensor([0, 1, 5, 6, 7, 12]), torch.tensor([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("message", "name", "more"),
    [
        ("index must increase .* got 0 after 0: .*label_seq_id", "plain", {"index": TWO}),
        (r"index must be int64 of shape \(6,\)", "model", {"index": RISING[:5]}),
        (r"chain must be int64 of shape \(6,\) or of another", "plain", {"chain": TWO.float()}),
        ("index must be None with order='radial'", "radial", {"index": RISING, "pos": torch.ones(6, 3)}),
        ("ring must be the same for all tokens of a chain", "implicit", {"ring": TWO > 0}),
        (r"ring must be bool of shape \(6,\)", "implicit", {"ring": TWO}),
        ("ring must be None with filter='data'", "plain", {"ring": True}),
        ("ring must be None with causal=True", "implicit causal", {"ring": True}),
        ("num_chains must be None without chain, got 2", "plain", {"num_chains": 2}),
        ("num_chains must be at least the number of chains, 2, got 1", "plain", {"chain": TWO, "num_chains": 1}),
        ("max_num_nodes must be at least 13, the", "plain", {"index": RISING, "max_num_nodes": 12}),
        ("pos must be None with causal=True", "causal", {"pos": torch.ones(6, 3)}),
    ],
)  # fmt: skip
def test_bad_input(message, name, more, make):
    with pytest.raises(ValueError, match=message):
        make(name, torch.float32)(**TOKENS, **more)


def test_causal_tokens_have_no_radius():
    for kind, options in ((SE3HyenaOperator, {"causal": True}), (SE3Hyena, {"attn_kwargs": {"causal": True}})):
        with pytest.raises(ValueError, match="causal must be False with order='radial'"):
            kind(S, V, order="radial", **options)


def test_causal_vectors_cannot_come_from_positions():
    with pytest.raises(ValueError, match="out_vectors must be reachable"):
        SE3HyenaOperator(S, 0, out_vectors=2, hidden_vectors=3, causal=True)


def test_causal_edges_come_from_earlier_tokens(randomise):
    """In the order of the tokens, or by index between chains."""
    layer, x = randomise(SE3HyenaOperator(S, V, causal=True, local_context=True)), TOKENS
    edges = torch.tensor([[0, 2, 3], [0, 4, 5]])
    assert layer(**x, edge_index=edges)[0].shape == (6, S)
    layer(**x, edge_index=edges, chain=TWO, index=torch.tensor([0, 1, 2, 1, 2, 4]))
    with pytest.raises(ValueError, match=r"edge_index must join no later token to an earlier one with causal=True"):
        layer(**x, edge_index=edges.flip(0))
    with pytest.raises(ValueError, match=r"got an edge from 12 to 2 along the sequence"):
        layer(**x, edge_index=edges, chain=TWO, index=torch.tensor([0, 1, 12, 1, 2, 4]))
