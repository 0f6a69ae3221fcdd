"""The contract of every public operator and module: what torch's transforms may do with it.

One row a case of :data:`cases.CASES`, all in float64. Each case is seen as a function of two numbers, which move all of
its floating point inputs and parameters at once, to two numbers, which are projections of its outputs.
"""

import contextlib
import copy
import functools
import io
import pickle

import cases
import pytest
import torch
from cases import CASES, FIRST, ONE_A_NAME, Call, agree, besides, is_floating, run
from clouds import S, V
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves


def _moves(x):
    """Whether an input is a tensor of real numbers; whole ones are offsets."""
    return is_floating(x) and not torch.equal(x, x.round())


class Problem:
    """A case with its variables, as functions that transforms take."""

    def __init__(self, name: str) -> None:
        pytest.importorskip(CASES[name].host)
        torch.manual_seed(2)
        self.name, self.vary = name, CASES[name].inputs
        self.module, inputs = CASES[name].build(torch.float64)
        if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in self.module.modules()):
            self.module.eval()  # in training it writes to its statistics, which torch refuses under vmap
        self.inputs = {n: x for n, x in inputs.items() if _moves(x) and n != "projection"}  # which is drawn
        self.rest = {n: x for n, x in inputs.items() if n not in self.inputs}
        self.parameters = {n: p.detach() for n, p in self.module.named_parameters()}

    def outputs(self, inputs, parameters):
        out = torch.func.functional_call(self.module, parameters, (), {**self.rest, **inputs})
        return [x for x in tree_leaves(out) if is_floating(x)]

    def loss(self, inputs, parameters):
        return sum(
            (x * torch.cos(torch.arange(x.numel()).to(x)).view_as(x)).sum() for x in self.outputs(inputs, parameters)
        )

    @functools.cached_property
    def directions(self):
        draw = functools.partial(torch.randn, dtype=torch.float64)
        inputs, parameters = (
            {n: draw(2, *x.shape) for n, x in part.items()} for part in (self.inputs, self.parameters)
        )
        if "edge_vectors" in inputs:  # these stay differences of positions
            first, second = self.rest["edge_index"]
            inputs["edge_vectors"] = inputs["pos"][:, second] - inputs["pos"][:, first]
        return [inputs, parameters]

    def curve(self, c):
        """R^2 -> R^2."""
        moved = [
            {n: x + torch.tensordot(c, directions[n], 1) * 0.1 for n, x in part.items()}
            for part, directions in zip((self.inputs, self.parameters), self.directions, strict=True)
        ]
        flat = torch.cat([x.flatten() for x in self.outputs(*moved)])
        place = torch.arange(flat.numel(), dtype=torch.float64)
        return torch.stack([(flat * torch.cos(place * k)).mean() for k in (1, 2)])

    def jacobian(self, c):
        """That of the curve by reverse mode, one output at a time."""
        c = c.detach().requires_grad_()
        return torch.stack([torch.autograd.grad(y, c, retain_graph=True)[0] for y in self.curve(c)])


def close(got, wanted, tolerance=1e-9):
    scale = max(1e-3, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * scale)


START = torch.tensor([0.3, -0.2], dtype=torch.float64)


ROTARY = ["GroupAttention rotary", "GroupAttention rotary, relative", "LiftingAttention rotary"]  # another operator


@pytest.fixture(
    params=[*(name for name in ONE_A_NAME if name != "RandomFeatures"), *besides(ROTARY[:1], ROTARY)], scope="module"
)
def case(request):
    """Where there is anything to differentiate."""
    return Problem(request.param)


def test_first_derivatives(case):
    wanted = case.jacobian(START)
    assert wanted.abs().max() > 0
    close(torch.func.jacrev(case.curve)(START), wanted)
    close(torch.func.jacfwd(case.curve)(START), wanted)
    close(torch.autograd.functional.jacobian(case.curve, START, vectorize=True), wanted)  # by batched gradients
    tangent = torch.tensor([1.0, -2.0], dtype=torch.float64)
    with forward_ad.dual_level():
        out = case.curve(forward_ad.make_dual(START, tangent))
        close(forward_ad.unpack_dual(out).tangent, wanted @ tangent)


def test_second_derivatives(case):
    c = START.clone().requires_grad_()
    (first,) = torch.autograd.grad(case.curve(c).sum(), c, create_graph=True)
    if not first.requires_grad:
        pytest.skip("linear in all that moves")
    got = torch.stack([torch.autograd.grad(g, c, retain_graph=True)[0] for g in first])
    step = 1e-5 * torch.randn(2, dtype=torch.float64)
    ahead, behind = (case.jacobian(START + e).sum(0) for e in (step, -step))
    close(got @ step / 1e-5, (ahead - behind) / 2e-5, 1e-5)
    close(torch.func.hessian(lambda c: case.curve(c).sum())(START), got)
    close(torch.autograd.functional.hessian(lambda c: case.curve(c).sum(), START, vectorize=True), got)
    if case.name == "RegularGlobalNorm":
        return  # torch's group norm fails there
    batched = torch.autograd.functional.jacobian(case.curve, c, create_graph=True, vectorize=True).sum(0)
    close(torch.stack([torch.autograd.grad(g, c, retain_graph=True)[0] for g in batched]), got)


def test_vmap_and_gradients_of_samples(case):
    samples = {n: torch.stack([x, 0.9 * x]) for n, x in case.inputs.items()}
    alone = [{n: x[k] for n, x in samples.items()} for k in range(2)]
    if not samples:
        pytest.skip("no floating point inputs")
    got = torch.vmap(case.outputs, in_dims=(0, None))(samples, case.parameters)
    for k in range(2):
        for a, b in zip(got, case.outputs(alone[k], case.parameters), strict=True):
            close(a[k], b)
    gradients = torch.func.grad(case.loss, argnums=(0, 1))
    got = torch.vmap(gradients, in_dims=(0, None))(samples, case.parameters)
    for k in range(2):
        inputs, parameters = (
            {n: x.detach().requires_grad_() for n, x in p.items()} for p in (alone[k], case.parameters)
        )
        variables = [*inputs.values(), *parameters.values()]
        wanted = torch.autograd.grad(case.loss(inputs, parameters), variables, materialize_grads=True)
        for a, b in zip([*got[0].values(), *got[1].values()], wanted, strict=True):
            close(a[k], b)


SCRIPTED = [
    "GroupAttention", "PerformerBlock", "SE3Hyena", "VectorSelfAttention", "R2AttentionBlock", "GroupTransformer",
    "RelativePerformerConv", "RelativeGPSBlock",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_torchscript_is_refused_with_what_to_use(name):
    """Those of e3nn in their own tests. Traces are refused in a model, too."""
    problem, wanted = Problem(name), r"does not support TorchScript .* use torch\.compile, or torch\.export"
    with pytest.raises(NotImplementedError, match=wanted):
        torch.jit.script(problem.module)
    model = Positional(problem.module, list(problem.inputs), problem.rest)
    with pytest.raises(NotImplementedError, match=wanted):
        torch.jit.trace(model, tuple(problem.inputs.values()))
    model(*problem.inputs.values())


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_vmap_over_graphs_needs_their_number():
    layer, batch = CASES["SE3HyenaOperator flat"].make(), torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]])

    def call(scalars, vectors, batch, **sizes):
        return layer(scalars, vectors, pos=None, batch=batch, **sizes)[0]

    inputs = torch.randn(2, 4, S), torch.randn(2, 4, V, 3), batch
    got = torch.vmap(lambda *x: call(*x, batch_size=2, max_num_nodes=3))(*inputs)
    same(got, torch.stack([call(*x) for x in zip(*inputs, strict=True)]).to(got))
    with pytest.raises(ValueError, match=r"batch_size and max_num_nodes must be given .* torch\.vmap goes over, "):
        torch.vmap(call)(*inputs)


MIXED = ["GroupAttention", "PerformerAttention ragged window"]


@pytest.mark.parametrize("name", ["GroupAttention"])
def test_programs_refuse_forward_mode_instead_of_zero_tangents(name):
    """Exported ones, which run our operators, here those that compile nothing; after that all is as before."""
    case = Problem(name)
    inputs = {**case.rest, **case.inputs}
    values = tuple(inputs.values())
    program = torch.export.export(Positional(case.module, list(inputs)), values).module()
    moving = list(inputs).index(next(iter(case.inputs)))
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) if i == moving else x for i, x in enumerate(values)]
        with pytest.raises(RuntimeError, match="forward-mode differentiation cannot go through an operator"):
            program(*dual)
    same(program(*values), case.module(**inputs))


@pytest.mark.parametrize("name", MIXED)
def test_forward_mode_through_the_backward_of_an_earlier_graph(name):
    """Backward is linear in what it is given, so with itself as the tangent it gives its own output as one."""
    case = Problem(name)
    inputs = {n: x.detach().requires_grad_() for n, x in case.inputs.items()}
    out = case.outputs(inputs, case.parameters)[-1]
    with forward_ad.dual_level():
        given = torch.randn_like(out)
        grads = torch.autograd.grad(out, list(inputs.values()), forward_ad.make_dual(given, given), allow_unused=True)
        for primal, tangent in (forward_ad.unpack_dual(g) for g in grads if g is not None):
            close(tangent, primal)


class Positional(torch.nn.Module):
    """A module of keyword arguments, given in turn, as torch.export wants them where their sizes vary."""

    def __init__(self, module, names, rest=None):
        super().__init__()
        self.module, self.names, self.rest = module, names, rest or {}

    def forward(self, *values):
        return self.module(**self.rest, **dict(zip(self.names, values, strict=True)))


# modules whose program is another's with a wrapper, a part of another's, or that of another with other numbers
SAME_PROGRAM = {
    "LiftingAttention volume", "GroupAttention disk", "GroupTransformer masked", "GroupTransformer batch",
    "SE3HyenaOperator radial local", "IrrepsSE3HyenaOperator local", "IrrepsSE3HyenaOperator implicit",
    "IrrepsVectorSelfAttention local",
    *(name for name in CASES if name.startswith("R3")),
}  # fmt: skip
PARTS = {
    "SE3HyenaOperator", "CliffordMLP", "VectorSelfAttention", "IrrepsSE3HyenaOperator", "IrrepsVectorSelfAttention",
}  # fmt: skip
VARYING = [name for name, case in CASES.items() if case.varies and name not in SAME_PROGRAM]


def same(got, wanted):
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 if b.dtype == torch.float64 else 1e-5)


@pytest.fixture
def default_products(monkeypatch):
    """Tensor products as e3nn makes them by default, without products of three factors. In those, torch reads sizes to
    choose the order of factors."""
    monkeypatch.setattr(cases, "einsums_as_written", contextlib.nullcontext)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.slow
@pytest.mark.parametrize("name", VARYING)
def test_compiled_for_batches_of_all_sizes(name, default_products):
    """Compilations are counted without running what was compiled."""
    varying, graphs = Problem(name), []

    def backend(graph, inputs):
        graphs.append(graph)
        outputs = graph.graph.output_node().args[0]
        return lambda *inputs: [torch.zeros(())] * len(outputs)

    torch._dynamo.reset()
    compiled = torch.compile(varying.module, fullgraph=True, dynamic=True, backend=backend)
    for step in range(6):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            compiled(**varying.vary(step))
    assert 1 <= len(graphs) <= 2


REORDERED = ["SE3HyenaOperator radial", "PerformerAttention masked window"]  # another order of nodes, or fewer pairs
SINGLE = [name for name in FIRST if name in VARYING and name not in {"GroupTransformer", *PARTS}] + REORDERED + ROTARY


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", besides({"GroupAttention"}, SINGLE))
def test_compiled_equals_eager(name):
    """Outputs and gradients."""
    pytest.importorskip(CASES[name].host)
    module, inputs = CASES[name].build(torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(exported_form(module.eval()), fullgraph=True, backend="aot_eager")
    agree(run(compiled, inputs), run(module, inputs), 1e-9)


@pytest.mark.parametrize("name", besides(FIRST))
def test_copies(name):
    """From a state_dict, pickled and deep, on inputs of other sizes; of escnn's, whose types are shared, the first."""
    pytest.importorskip(CASES[name].host)
    (module, _), (loaded, _) = (CASES[name].build(torch.float64) for _ in range(2))
    module.eval(), loaded.eval()
    inputs = CASES[name].inputs(1)
    wanted = module(**inputs)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    same(loaded(**inputs), wanted)
    if not isinstance(module, Call):
        assert repr(module).startswith(type(module).__name__)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            same(other(**inputs), wanted)
    for part in module.parts if isinstance(module, Call) else [module]:
        for method in ("redraw_features", "reset_parameters"):
            if hasattr(part, method):
                getattr(part, method)()
                assert all(bool(x.isfinite().all()) for x in tree_leaves(module(**inputs)))


# the strict way traces as torch.compile does, of which test_compiled_for_batches_of_all_sizes asks the same
STRICT = ["GroupAttention", "PerformerAttention ragged window", "SE3Hyena"]
EXPORTED = [*((name, False) for name in VARYING), *((name, True) for name in STRICT)]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "strict"), EXPORTED)
def test_exported_for_batches_of_all_sizes(name, strict, default_products):
    varying = Problem(name)
    module, batches = exported_form(varying.module.eval()), [varying.vary(step) for step in range(3)]
    sizes = [dynamic(*steps) for steps in zip(*(batch.values() for batch in batches), strict=True)]
    program = torch.export.export(
        Positional(module, list(batches[0])), tuple(batches[0].values()), dynamic_shapes=(tuple(sizes),), strict=strict
    ).module()
    for inputs in batches:
        same(program(*inputs.values()), module(**inputs))


def dynamic(first, *others):
    """Which sizes of batches' inputs differ, as torch.export wants it."""
    if isinstance(first, torch.Tensor):
        sizes = zip(first.shape, *(other.shape for other in others), strict=True)
        return {a: torch.export.Dim.AUTO for a, size in enumerate(sizes) if len(set(size)) > 1}
    return None if all(first == other for other in others) else torch.export.Dim.AUTO


def exported_form(module):
    """What escnn's own ``export`` leaves of a module of fields, or the module itself."""
    if isinstance(module, Call) and hasattr(module.parts[0], "export"):
        return Call(lambda part, x: part(x), module.parts[0].export())
    return module
