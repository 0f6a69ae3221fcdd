"""Outputs worked out by hand, one or two for each family, as docs/concepts.md has them."""

import math

import torch
from attention_operands import group_attention

from tg_equiattn import functional as F
from tg_equiattn.chains.vector_attention import vector_attention
from tg_equiattn.graphs import NeighborList
from tg_equiattn.grids import Window
from tg_equiattn.group.encodings import relation_index
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import ChargeInteraction, EwaldAttention, PerformerAttention

LOG3, WINDOW = math.log(3), Window(2, 3)


def check(out, *wanted):
    torch.testing.assert_close(out.flatten(), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_group_attention():
    # one pixel with values 0 and 8 of two elements: the other element, t^-1 s, weighs three times as much as one's own
    zero, value = torch.zeros(1, 1, 1, 2, 1, 1), torch.tensor([0.0, 8.0]).view(1, 1, 1, 2, 1, 1)
    encodings, index = (torch.zeros(2, 9, 1), torch.zeros(2, 1)), relation_index(cyclic(2), "relative")
    bias = torch.tensor([[0.0, LOG3]])
    check(group_attention(zero, zero, value, *encodings, index, window=WINDOW, group_bias=bias), 6.0, 2.0)


def test_linear_attention_with_relative_positions():
    # features exp(0) = 1 weigh all pairs 2 = exp(ln 2); near are the node itself, with 1 more, and its neighbor, with 3
    # more; the third node is far: (3 · 0 + 5 · 10 + 2 · 100) / 10, (5 · 0 + 3 · 10 + 2 · 100) / 10, (300 + 20) / 7
    layer = PerformerAttention(1, 1, cutoff=2, pos_dim=1, method="features")
    parameters = layer.query.weight, layer.key.weight, layer.value.weight, layer.out.weight, layer.out.bias
    parameters += layer.positions.far_bias, layer.positions.variance.log, layer.positions.offset_bias.table
    numbers = 0, 0, 1, 1, 0, math.log(2), math.log(0.5), torch.tensor([[LOG3, 0, LOG3]])
    with torch.no_grad():
        for parameter, number in zip(parameters, numbers, strict=True):
            parameter.copy_(torch.as_tensor(number))
    near = NeighborList(torch.tensor([[0, 1], [1, 0]]), 3, torch.tensor([[-1.0], [1.0]]))
    check(layer(torch.tensor([[0.0], [10.0], [100.0]]), neighbors=near), 25.0, 23.0, 320 / 7)


def test_ewald_attention():
    # a Coulomb kernel of width 1: K(0) = sqrt(2 / pi) = 0.797885, K(2) = erf(2 / sqrt 2) / 2 = 0.477250; values 1 and 3
    layer = EwaldAttention(1, 0, width=0.5**0.5, num_gaussians=0, num_coulomb=1, lmax=0)
    torch.nn.init.zeros_(layer.query_key[0])  # queries and keys are their bias, 1
    torch.nn.init.ones_(layer.value[0])
    torch.nn.init.ones_(layer.product.weights[0])
    pos = torch.tensor([[0.0, 0, 0], [2.0, 0, 0]])
    out, _ = layer(torch.tensor([[1.0], [3.0]]), None, pos=pos)
    check(out, 0.797885 + 3 * 0.477250, 3 * 0.797885 + 0.477250)
    # charges 1 and -1: (K(0) - K(2)) / 2 for each
    check(F.charge_energies(torch.tensor([1.0, -1.0]), pos, width=1.0), *[(0.797885 - 0.477250) / 2] * 2)


def test_charges():
    # an edge of length 1 of cutoff 2 fades to (1 - 1/4)^3 = 27/64 and moves 1 · (5 - 3) of it from atom 0 to atom 1
    layer = ChargeInteraction({"Na": 1.0, "Cl": -1.0}, width=1.0, scalars=1, cutoff=2.0)
    torch.nn.init.ones_(layer.weights)
    edges = {"edge_index": torch.tensor([[0, 1], [1, 0]]), "edge_vectors": torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])}
    features, pos = torch.tensor([[5.0], [3.0]]), torch.tensor([[0.0, 0, 0], [1.0, 0, 0]])
    out = layer(torch.tensor([0, 1]), pos, features=features, **edges)
    check(out.charges, 1 - 2 * 27 / 64, -1 + 2 * 27 / 64)


def test_vector_attention():
    # the cross product a z of x and a y, of length sqrt 2 ln 3, weighs 3/4, that of x and 0 1/4: 1/2 · 3/4 · a y
    a, (x, y, _) = 2**0.5 * LOG3, torch.eye(3)
    q, k, v = (torch.stack(rows).view(1, 1, 2, 3) for rows in ((x, x), (a * y, 0 * y), (x, x)))
    check(vector_attention(q, k, v, None), 0, 3 * a / 8, 0, 0, 3 * a / 8, 0)
