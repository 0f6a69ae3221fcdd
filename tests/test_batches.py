"""Graphs of a batch are what they are alone, for every public function and module that takes several, and a graph or
an image may have no valid node or pixel.

One row a case of :data:`cases.CASES`: outputs, gradients of inputs and the sum of gradients of parameters."""

import importlib.util

import pytest
import torch
from cases import CASES, besides, is_floating, run
from torch.utils._pytree import tree_leaves

INSTALLED = {name: case for name, case in CASES.items() if importlib.util.find_spec(case.host)}
INPUTS = {name: case.inputs(0) for name, case in INSTALLED.items()}
OF_PAIRS = {"edge_index", "edge_attr", "edge_offset", "edge_vectors", "target", "source", "offsets"}
OF_GRAPHS = {"cell", "pbc", "total_charge"}
SLOW = {name for name in CASES if name.startswith(("Irreps", "LongTensor", "R3"))} - {"IrrepsSE3HyenaOperator"}
FLAT = [name for name, inputs in INPUTS.items() if "batch" in inputs]
PADDED = [name for name, inputs in INPUTS.items() if "lengths" in inputs]


def built(name):
    torch.manual_seed(4)
    module, inputs = CASES[name].build(torch.float64)
    return module.eval(), inputs


def one_graph(inputs, graph):
    """The tensors of one graph of a flat batch."""
    nodes = inputs["batch"] == graph
    first = int(nodes.int().argmax())
    pairs = nodes[inputs["edge_index"][1] if "edge_index" in inputs else inputs.get("target", torch.zeros(0).long())]
    out = {}
    for name, x in inputs.items():
        if name in OF_PAIRS:
            x = x[..., pairs] if name == "edge_index" else x[pairs]
            x = x - first if name in ("edge_index", "target", "source") else x
        elif name in OF_GRAPHS:
            x = x[graph : graph + 1]
        elif isinstance(x, torch.Tensor) and x.shape[:1] == nodes.shape:
            x = x[nodes]
        out[name] = x
    return out | {"batch": torch.zeros(int(nodes.sum())).long()} | ({"batch_size": 1} if "batch_size" in inputs else {})


def outputs_and_gradients(module, inputs, kept=slice(None)):
    inputs = {n: x.clone().requires_grad_() if is_floating(x) else x for n, x in inputs.items()}
    out = [x[kept] if x.shape[:1] == getattr(kept, "shape", None) else x for x in tree_leaves(module(**inputs))]
    leaves = [x for x in (*inputs.values(), *module.parameters()) if is_floating(x)]
    loss = sum(x.square().sum() for x in out if x.requires_grad)
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)
    count = len(grads) - len(list(module.parameters()))
    return out, dict(zip([n for n, x in inputs.items() if is_floating(x)], grads, strict=False)), grads[count:]


def close(got, wanted):
    scale = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("name", besides({*FLAT} - SLOW, FLAT))
def test_graphs_of_a_batch_are_as_alone(name):
    """NaN in the features of one graph stays there."""
    module, inputs = built(name)
    batch, graphs = inputs["batch"], int(inputs["batch"].max()) + 1
    out, grads, of_parameters = outputs_and_gradients(module, inputs)
    found = [outputs_and_gradients(module, one_graph(inputs, graph)) for graph in range(graphs)]
    for n, x in enumerate(out):
        close(x, torch.cat([part[n] for part, *_ in found]))
    for n, grad in grads.items():
        if grad.shape[:1] == batch.shape and n not in OF_PAIRS:
            close(grad, torch.cat([part[n] for _, part, _ in found]))
    for total, *parts in zip(of_parameters, *(part for *_, part in found), strict=True):
        close(total, sum(parts))
    spoilt = {n: x.clone() if is_floating(x) and x.shape[:1] == batch.shape else x for n, x in inputs.items()}
    for n in spoilt.keys() - {"pos"} - OF_PAIRS:
        if spoilt[n] is not inputs[n]:
            spoilt[n][batch == 1] = torch.nan
    for x, wanted in zip(tree_leaves(module(**spoilt)), out, strict=True):
        others = batch != 1 if x.shape[:1] == batch.shape else torch.arange(len(x)) != 1
        close(x[others], wanted[others])
    assert any(bool(x.isnan().any()) for x in tree_leaves(module(**spoilt)))


@pytest.mark.parametrize("name", PADDED)
def test_padded_sequences_are_as_alone(name):
    """Whatever is beyond their lengths, where outputs are zero."""
    module, inputs = built(name)
    tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor) and n != "lengths"}
    lengths, (count, longest) = inputs["lengths"], next(iter(tensors.values())).shape[:2]
    valid = torch.arange(longest) < lengths[:, None]
    assert (count, longest) == valid.shape
    padded = {n: x.masked_fill(~valid.view(*valid.shape, *[1] * (x.ndim - 2)), torch.nan) for n, x in tensors.items()}
    out = tree_leaves(module(**inputs | padded))
    for b, size in enumerate(lengths.tolist()):
        if size:
            alone = tree_leaves(module(**{n: x[b : b + 1, :size] for n, x in tensors.items()}))
            for x, wanted in zip(out, alone, strict=True):
                close(x[b : b + 1, :size] if x.shape[:2] == valid.shape else x[b : b + 1], wanted)
    assert not any(x[~valid].any() for x in out if x.shape[:2] == valid.shape)


NAMES = [name for name in CASES if "masked" in name] + [
    "SE3HyenaOperator", "VectorSelfAttention",
    "EwaldAttention",
]  # fmt: skip
OF_NODES = {"x", "context", "query", "key", "value", "q", "k", "scalars", "vectors", "pos"}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_valid(name):
    """Outputs and gradients are zero there, NaN has no effect, and others are as in a batch without it."""
    module, inputs = CASES[name].build(torch.float64)
    module.eval()
    nodes = [n for n in inputs if n in OF_NODES and isinstance(inputs[n], torch.Tensor)]
    valid = inputs.keys() & {"mask", "context_mask", "lengths"}
    for n in valid:
        inputs[n] = inputs[n].expand(len(inputs[nodes[0]]), *inputs[n].shape[1:]).clone()
        inputs[n][0] = 0
    for n in nodes:
        inputs[n][0] = torch.nan
    outs, grads = run(module, inputs)
    assert not any(out[0].any() for out in outs if out.numel())
    assert all(bool(x.isfinite().all()) for x in (*outs, *grads) if x is not None)
    of_inputs = dict(zip([n for n, x in inputs.items() if is_floating(x)], grads, strict=False))  # before parameters
    assert not any(of_inputs[n][0].any() for n in nodes if of_inputs[n] is not None)
    alone, _ = run(module, {n: x[1:] if n in (*nodes, *valid) else x for n, x in inputs.items()})
    for out, other in zip(outs, alone, strict=True):
        torch.testing.assert_close(out[1:], other, rtol=0, atol=1e-12)
