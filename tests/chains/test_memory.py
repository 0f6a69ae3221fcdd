"""Vectors with a memory: products of scalars with convolved vectors, exponential filters, outputs token by token."""

import pytest
import torch
from clouds import S, V, close, gradients
from space import error, motion

from tg_equiattn.chains.clifford import Grades
from tg_equiattn.chains.operator import MixedProducts, TokenOperator
from tg_equiattn.chains.sequences import OperatorSettings, Sequences, TokenBatch
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator, VectorSelfAttention

HIDDEN = Grades(3, 5, 2, 4)


def test_mixed_products_equal_the_definition(randomise):
    """0e x 1o and 0o x 1e to 1o, 0e x 1e and 0o x 1o to 1e, one channel at a time."""
    layer, n = randomise(MixedProducts(HIDDEN)).double(), 6
    even, odd, polar, axial = (torch.randn(*shape, n).double() for shape in ((3,), (4,), (3, 5), (3, 2)))
    scale, turn, (to_polar, to_axial) = *layer.gates.weights, layer.swap.weights
    g = torch.einsum("cs,sn->cn", scale, even) + layer.gates.bias[:, None]
    h = torch.einsum("cp,pn->cn", turn, odd)
    wanted = torch.cat([
        g[:5] * polar + torch.einsum("vb,xbn->xvn", to_polar, h[5:] * axial),
        g[5:] * axial + torch.einsum("bv,xvn->xbn", to_axial, h[:5] * polar),
    ], 1)  # fmt: skip
    inputs = [torch.cat([even, odd]).requires_grad_(), torch.cat([polar, axial], 1).requires_grad_()]
    out = layer(*inputs)
    close([out], [wanted], 1e-12)
    assert all(g.abs().max() > 0 for g in gradients([out], [*inputs, *layer.parameters()]))


@pytest.mark.parametrize("mirror", [False, True])
def test_mixed_products_keep_parity(mirror, randomise):
    """All four grades in and out. Gates by scalars of the other parity break mirrors, and no rotations."""
    layer = randomise(TokenOperator(HIDDEN, HIDDEN, HIDDEN, OperatorSettings(filter="exponential"))).double()
    x, r = torch.randn(HIDDEN.dim, 7).double(), motion(torch.float64, mirror)

    def moved(x):
        scalars, polar, axial, pseudo = HIDDEN.parts(x)
        polar, axial = (torch.einsum("xy,ycn->xcn", m, part) for m, part in ((r, polar), (r.det() * r, axial)))
        return torch.cat([part.flatten(0, 1) for part in (scalars, polar, axial, r.det() * pseudo)])

    def broken():
        state = sample_of(x.shape[1])
        return error([layer(moved(x), state)], [moved(layer(x, state))])

    assert broken() <= 1e-12
    products = layer.products.forward
    layer.products.forward = lambda scalars, vectors: products(scalars.flip(0), vectors)
    assert (broken() > 1e-4) == mirror


def sample_of(n):
    """Tokens of one sequence without positions."""
    batch = NodeBatch.dense(1, n, None, torch.device("cpu"))
    return TokenBatch(torch.zeros(3, n).double(), batch, Sequences(batch))


def test_the_plain_convolution_of_vectors():
    """Parallel vectors of one channel have no cross products: without mixed products, vectors do not move vectors."""

    def moves(**options):
        torch.manual_seed(3)
        layer = SE3HyenaOperator(1, 1, filter="implicit", causal=True, **options).double()
        along = torch.randn(1, 9, 1, 1).double() * torch.tensor([1.0, 0.0, 0.0]).double()
        other = along.clone()
        other[:, 2] *= -1
        ones = torch.ones(1, 9, 1).double()
        return float((layer(ones, other)[1] - layer(ones, along)[1])[:, 5:].detach().abs().max())

    assert moves() > 1e-5
    assert moves(mixed_products=False) < 1e-12


STEPS = ["exponential causal", "exponential causal model"]


@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_the_convolution(name, make):
    """Token by token, with gradients through the states."""
    layer, scalars, vectors = make(name, std=0.4), torch.randn(2, 19, S).double(), torch.randn(2, 19, V, 3).double()
    inputs = [scalars.requires_grad_(), vectors.requires_grad_(), *layer.parameters()]
    state, outs = None, []
    for t in range(19):
        state, out = layer.step(state, scalars[:, t], vectors[:, t])
        outs.append(out)
    got, wanted = [torch.stack(part, 1) for part in zip(*outs, strict=True)], layer(scalars, vectors)
    assert error(got, wanted) <= 1e-12
    close(gradients(got, inputs), gradients(wanted, inputs), 1e-9)


@pytest.mark.parametrize(
    ("message", "layer"),
    [
        ("filter must be 'exponential' for step, got 'implicit'",
         lambda: SE3HyenaOperator(S, V, filter="implicit", causal=True)),
        ("causal must be True for step, got False", lambda: SE3HyenaOperator(S, V, filter="exponential")),
        ("local_context must be False for step, got True",
         lambda: SE3HyenaOperator(S, V, filter="exponential", causal=True, local_context=True)),
        ("pool must be None for step, got 'mean'",
         lambda: SE3Hyena(S, V, pool="mean", attn_kwargs={"filter": "exponential", "causal": True})),
        ("attention must be False for step", lambda: VectorSelfAttention(S, V)),
    ],
)  # fmt: skip
def test_steps_refuse_other_layers(message, layer):
    with pytest.raises(ValueError, match=message):
        layer().step(None, torch.ones(2, S), torch.ones(2, V, 3))


def test_checkpoints_of_the_first_mixed_products_are_refused():
    """They had Clifford MLPs for projections, and did not store it."""
    layer = SE3HyenaOperator(S, V, filter="implicit")
    settings = layer.module.settings()
    layer.module.settings = lambda: {name: value for name, value in settings.items() if name != "projections"}
    with pytest.raises(ValueError, match="projections='linear', like this one, got 'Clifford MLP'"):
        SE3HyenaOperator(S, V, filter="implicit").load_state_dict(layer.state_dict())


@pytest.mark.parametrize("filter", ["implicit", "exponential"])
def test_outputs_grow_linearly(filter):
    """Features of any size: no product of tokens grows faster than they do."""
    torch.manual_seed(0)
    layer = SE3Hyena(S, V, num_layers=2, attn_kwargs={"filter": filter}, hidden_scalars=5, hidden_vectors=7).double()
    scalars, vectors = torch.randn(1, 9, S).double(), torch.randn(1, 9, V, 3).double()
    large, larger = (layer(size * scalars, size * vectors)[1].abs().max() for size in (1e6, 1e7))
    assert 5 < larger / large < 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["implicit causal model", "exponential causal"])
def test_causal_layers_compile_for_all_lengths(name, make):
    """In one graph; two are made, for one and for all sizes. Outputs and gradients are those of eager calls."""
    layer, graphs = make(name), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for count, n in ((2, 7), (3, 12), (4, 23)):
        inputs = [torch.randn(shape).double().requires_grad_() for shape in ((count, n, S), (count, n, V, 3))]
        got, wanted = compiled(*inputs), layer(*inputs)
        close(got, wanted, 1e-10)
        close(gradients(got, inputs), gradients(wanted, inputs), 1e-9)
    assert len(graphs) <= 2
