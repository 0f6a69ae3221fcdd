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


def test_training_after_a_first_call_in_inference_mode(name):
    """Tables that are made there are ordinary tensors."""
    module, inputs = CASES[name].build(torch.float32)
    with torch.inference_mode():
        module.eval()(**inputs)
    loss = sum(x.square().sum() for x in tree_leaves(module(**inputs)) if isinstance(x, torch.Tensor))
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True) if loss.requires_grad else ()
    assert all(bool(x.isfinite().all()) for x in grads if x is not None)


def test_stacked_modules_compute_as_each(name):
    """With the seeds of their random features."""
    members = [built(name, torch.float64) for _ in range(2)]
    (one, inputs, _), *_ = members
    stacked = torch.func.stack_module_state([module for module, *_ in members])
    run = torch.vmap(lambda *tensors: tree_leaves(torch.func.functional_call(one, tensors, (), inputs)))
    found = run(*stacked)
    for number, (module, *_) in enumerate(members):
        close([out[number] for out in found], tree_leaves(module(**inputs)))


def test_the_mean_of_two_state_dicts_loads(name):
    (one, *_), (two, *_), (module, *_) = (built(name) for _ in range(3))
    first, second = one.state_dict(), two.state_dict()
    mean = {key: (first[key] + second[key]) / 2 for key in first}
    module.load_state_dict(mean)
    for key, p in module.named_parameters():
        torch.testing.assert_close(p.detach(), mean[key])


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
