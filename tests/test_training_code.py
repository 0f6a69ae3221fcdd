"""State in ordinary training code: averages of models and of state_dicts, construction on the meta device.

One row a module of :data:`cases.CASES`. Tables of indices and geometry are no state, so none of this may change them.
"""

import copy
import gc
import importlib

import pytest
import ranks
import torch
from cases import CASES, GATE, besides
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from tg_equiattn import nn as layers
from tg_equiattn.groups import cyclic, dihedral

C4 = cyclic(4)
STOCHASTIC = "PerformerAttention window"  # its state has seeds
DECAYS = (0.9, 0.99, 0.9999)
WITHOUT_PARAMETERS = ("SpatialMaxPool", "SpatialCrop", "GlobalPooling", "GlobalPooling of the group")
MODULES = [
    name for name in CASES if name[0].isupper() and name not in WITHOUT_PARAMETERS
]  # functions have small letters


@pytest.fixture(params=besides(GATE, MODULES))
def name(request):
    pytest.importorskip(CASES[request.param].host)
    torch.manual_seed(3)
    return request.param


def built(name, dtype=torch.float32):
    """A module with random parameters in eval mode, its inputs and outputs."""
    module, inputs = CASES[name].build(dtype)
    module.eval()
    return module, inputs, tree_leaves(module(**inputs))


def assert_equal(module, inputs, wanted):
    close(module.eval()(**inputs), wanted)


def close(outputs, wanted):
    for a, b in zip(tree_leaves(outputs), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.detach().abs().max()) if b.numel() else 0)


def assert_averages_are_the_model(module, inputs, wanted):
    """The usual exponential average of weights and buffers, as Lightning's, and of a state_dict in place, as timm's."""
    for decay in DECAYS:
        average = AveragedModel(module.train(), multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        for _ in range(3):
            average.update_parameters(module)
        assert_equal(average.module, inputs, wanted)
        written = copy.deepcopy(module)
        for mean, x in zip(written.state_dict().values(), module.state_dict().values(), strict=True):
            mean.copy_(decay * mean + (1 - decay) * x)
        assert_equal(written, inputs, wanted)


def test_an_average_of_one_model_is_that_model(name):
    assert_averages_are_the_model(*built(name))


@pytest.mark.parametrize("name", ["GroupTransformer", STOCHASTIC], indirect=True)
def test_an_average_of_one_model_in_float64_is_that_model(name):
    assert_averages_are_the_model(*built(name, torch.float64))


def meta(name):
    with torch.device("meta"):
        return CASES[name].make()


def test_a_module_of_the_meta_device_is_loaded_whole(name):
    """By assignment and into uninitialised memory; and as the skeleton of a functional call."""
    module, inputs, wanted = built(name)
    state = module.state_dict()
    assigned = meta(name)
    assigned.load_state_dict(state, assign=True)
    assert_equal(assigned, inputs, wanted)
    emptied = meta(name).to_empty(device="cpu")
    for x in (*emptied.parameters(), *emptied.buffers()):
        torch.nn.init.constant_(x.detach(), 77)  # whatever the memory held
    emptied.load_state_dict(state)
    assert_equal(emptied, inputs, wanted)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    close(torch.func.functional_call(meta(name).eval(), tensors, (), inputs), wanted)


def test_stacked_modules_compute_as_each(name):
    """With the seeds of their random features."""
    members = [built(name, torch.float64) for _ in range(2)]
    (one, inputs, _), *_ = members
    stacked = torch.func.stack_module_state([module for module, *_ in members])
    run = torch.vmap(lambda *tensors: tree_leaves(torch.func.functional_call(one, tensors, (), inputs)))
    found = run(*stacked)
    for number, (module, *_) in enumerate(members):
        close([out[number] for out in found], tree_leaves(module(**inputs)))


AVERAGES = {
    "mean": lambda a, b: (a + b) / 2,
    "decayed": lambda a, b: 0.999 * a + 0.001 * b,
    "float64": lambda a, b: ((a.double() + b.double()) / 2).float(),
}


def assert_average_loads(name, average):
    (one, *_), (two, *_), (module, *_) = (built(name) for _ in range(3))
    first, second = one.state_dict(), two.state_dict()
    mean = {key: AVERAGES[average](first[key], second[key]) for key in first}
    module.load_state_dict(mean)
    for key, p in module.named_parameters():
        torch.testing.assert_close(p.detach(), mean[key])


@pytest.mark.filterwarnings("ignore:seed_digits of RandomFeatures are no seed")
def test_the_mean_of_two_state_dicts_loads(name):
    assert_average_loads(name, "mean")


@pytest.mark.filterwarnings("ignore:seed_digits of RandomFeatures are no seed")
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ["GroupTransformer", STOCHASTIC], indirect=True)
def test_every_average_of_two_state_dicts_loads(name, average):
    assert_average_loads(name, average)


# A module, arguments that change its function and no shape, and what the error says.
SETTINGS = {
    "GroupLinear": (lambda group=C4: layers.GroupLinear(group, 3, 5), {"group": dihedral(2)}, "group=D2"),
    "GroupTransformer": (
        lambda **change: layers.GroupTransformer(
            C4, 1, 3, **{"channels": (4,), "heads": 2, "kernel_size": 3, **change}
        ),
        {"pools": (1,)}, r"pools=\[1\]",
    ),
    "heads": (lambda heads=2: layers.PerformerAttention(8, 8, heads, position=None), {"heads": 4}, "heads=4"),
    "method": (
        lambda method="features": layers.PerformerAttention(8, 8, 2, position=None, method=method),
        {"method": "pairs"}, "method='pairs'",
    ),
    "offset": (
        lambda **change: layers.PerformerAttention(8, 8, 2, **{"offset": "mlp", "cutoff": 2.0, **change}),
        {"cutoff": 3.0}, "cutoff=3.0",
    ),
    "values": (
        lambda **change: layers.PerformerAttention(8, 8, 2, **{"offset": "table", "cutoff": 2, "pos_dim": 1, **change}),
        {"cutoff": 2, "values": "offset"}, "values='offset'",
    ),
    "RelativePerformer": (
        lambda **change: layers.RelativePerformer(1, 3, channels=8, num_layers=1, heads=2, cutoff=2, **change),
        {"periodic": True}, "periodic=True",
    ),
    "causality": (lambda **change: layers.SE3HyenaOperator(3, 2, **change), {"causal": True}, "causal=True"),
    "order": (lambda **change: layers.SE3HyenaOperator(3, 2, **change), {"order": "radial"}, "order='radial'"),
    "pooling": (
        lambda **change: layers.SE3Hyena(3, 2, hidden_scalars=4, hidden_vectors=4, num_layers=1, **change),
        {"pool": "mean"}, "pool='mean'",
    ),
    "width": (lambda width=1.0: layers.EwaldAttention(3, 2, width=width), {"width": 1.5}, "width=1.5"),
    "kernels": (
        lambda **change: layers.EwaldAttention(3, 2, width=1.0, **{"num_gaussians": 1, "num_coulomb": 1, **change}),
        {"num_gaussians": 2, "num_coulomb": 0}, "num_gaussians=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
def test_checkpoints_of_another_function_are_refused(what):
    make, change, message = SETTINGS[what]
    state = make().state_dict()
    make().load_state_dict(state)
    with pytest.raises(ValueError, match=f"state_dict must come from a .* with {message}.*, like this one, got "):
        make(**change).load_state_dict(state, strict=False)


def test_an_average_of_two_functions_is_refused():
    one, two = (layers.GroupLinear(group, 3, 5).state_dict() for group in (C4, dihedral(2)))
    mean = {key: (one[key] + two[key]) / 2 for key in one}
    with pytest.raises(ValueError, match="an average of several with equal settings, got an average of several with"):
        layers.GroupLinear(C4, 3, 5).load_state_dict(mean)


@pytest.mark.parametrize("name", ["GroupTransformer", "GlobalGroupAttention", STOCHASTIC], indirect=True)
def test_distributed_checkpoints_load(name):
    """Whole, and without settings and clocks where the tool leaves them out."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    module, inputs, wanted = built(name)
    state = get_model_state_dict(module)
    weights = {key: x for key, x in state.items() if not key.endswith("_extra_state")}
    assert len(weights) < len(state)
    for given, strict in ((state, True), (weights, False)):
        other, *_ = built(name)
        set_model_state_dict(other, given, options=StateDictOptions(strict=strict))
        assert_equal(other, inputs, wanted)


SHARDED = ("GroupAttention", "GlobalGroupAttention", "PerformerAttention window", "SE3Hyena", "EwaldAttention")


def run_sharded(number, device, folder):
    from torch.distributed.fsdp import fully_shard

    for name in SHARDED:
        module, inputs, wanted = torch.load(f"{folder}/{name}.pt", weights_only=False)
        close(fully_shard(module)(**inputs), wanted)


@pytest.mark.slow
def test_fully_sharded_modules_compute_the_same(tmp_path):
    for name in SHARDED:
        torch.manual_seed(5)
        torch.save(built(name), tmp_path / f"{name}.pt")
    ranks.run(run_sharded, tmp_path)


@pytest.fixture
def no_garbage_collection():
    """The compiler is loaded before: an operator's first call loads it, and that leaves a cycle behind."""
    importlib.import_module("torch._dynamo")
    gc.disable()
    yield
    gc.enable()


def accumulator(parameter):
    """The node that ends a parameter's graphs: a new one if no graph is alive."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def are_alive(parameters):
    return any("seen" in accumulator(p).metadata for p in parameters)


def test_an_output_that_is_dropped_frees_its_graph(name, no_garbage_collection):
    """Without the garbage collector, so that activations of one step are gone before the next. A captured CUDA graph
    needs it, too."""
    module, _, outputs = built(name)
    parameters = list(module.parameters())
    for parameter in parameters:
        accumulator(parameter).metadata["seen"] = True
    assert are_alive(parameters) == bool(parameters)
    loss = sum(out.float().square().sum() for out in outputs)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
    del outputs, loss, grads
    assert not are_alive(parameters)
