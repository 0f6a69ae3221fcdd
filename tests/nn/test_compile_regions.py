"""Models whose Clifford MLPs, gates and blocks are compiled region by region."""

import copy

import pytest
import torch
from cases import agree, run
from torch import nn
from whole_models import MODELS, Fixed

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import CliffordMLP, GroupLinear, compile_regions

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides its own unless it is an error
REGIONS = {"GEViT": 2, "RelativePerformer": 2, "SE3Hyena": 7, "VectorTransformer": 5}  # blocks; Clifford MLPs


def compiled_modules(model):
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def agrees_with_eager(model, x, backend):
    torch._dynamo.reset()
    compiled = compile_regions(copy.deepcopy(model), backend=backend, fullgraph=True)
    agree(run(compiled, x), run(model, x), 1e-9)


def test_outputs_and_gradients_are_those_of_the_eager_layer():
    model = nn.Sequential(CliffordMLP(2, 3, num_blocks=1)).double()
    agrees_with_eager(model, {"input": torch.randn(5, 2, 8, dtype=torch.float64)}, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_eager_model(name):
    model = Fixed(name).double().eval()
    agrees_with_eager(model, {"x": model.sample("cpu").double()}, "aot_eager")


@pytest.mark.parametrize("name", MODELS)
def test_each_region_is_compiled_once_and_the_state_keeps_its_names(name):
    model = Fixed(name)
    names = list(model.state_dict())
    assert not compiled_modules(model)  # nothing is compiled unless asked for
    assert compile_regions(model) is model
    assert len(compiled_modules(model)) == REGIONS[name]
    assert list(model.state_dict()) == names


def test_kinds_choose_the_regions():
    model = nn.Sequential(CliffordMLP(2, 3), nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
    compile_regions(model, kinds=(nn.Linear,))
    assert compiled_modules(model) == [model[1][0]]


def test_a_model_without_regions_is_refused():
    with pytest.raises(ValueError, match=r"model must contain .*MultivectorMLP.*, got GroupLinear without any"):
        compile_regions(GroupLinear(cyclic(4), 2, 3))
