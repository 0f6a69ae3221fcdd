"""Modules on an accelerator, emulated where there is none: the CPU's numbers, nothing left on the CPU, no waiting."""

import copy
from pathlib import Path

import pytest
import torch
from cases import CASES, Call, agree, attention, besides, run
from emulated import Exactly, Operators, accelerator, emulated, to_accelerator, values
from torch.utils._pytree import tree_map
from whole_models import MODELS, Fixed

from tg_equiattn.nn import GroupAttention

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
# of one case a name float32, whose variants convert numbers where the first does; of the core's variants float64
VARIED = besides([name for name in CASES if " " not in name])
OTHERS = besides([name for name, case in CASES.items() if " " in name and case.host == "torch"])


def there(module, inputs, watch=None):
    """What is found on the emulated accelerator, and on the CPU before."""
    expected = run(module, inputs)
    module, inputs = to_accelerator(module), tree_map(emulated, inputs)
    with accelerator(watch):
        return tree_map(values, run(module, inputs)), expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:relation=")
@pytest.mark.parametrize("case", OTHERS, indirect=True)
def test_an_accelerator_gives_the_cpus_numbers(case):
    """And copies nothing there, as a CUDA graph needs."""
    agree(*there(*case.build(torch.float64)), 1e-10)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_a_whole_model_neither_waits_nor_copies(name):
    """The condition of CUDA graphs: mode="reduce-overhead" and torch.cuda.make_graphed_callables."""
    model = Fixed(name).double()
    agree(*there(model, {"x": model.sample("cpu").double()}), 1e-9)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
@pytest.mark.filterwarnings("ignore:relation=")
def test_every_operator_of_a_case_has_a_cuda_kernel(case):
    module, inputs = case.build(torch.float32)
    with Operators() as used:
        run(module, inputs)
    assert used.without_kernel("CUDA") == []


def test_operators_without_a_kernel_are_named():
    """Every build of torch has these on CPUs, and no Fourier transforms of sparse tensors."""
    with Operators() as used:
        run(Call(lambda x: torch.fft.rfft(x.sort().values @ x.mT).real.cumsum(1)), {"x": torch.randn(2, 3)})
    assert used.without_kernel("CPU") == []
    assert "aten::_fft_r2c" in used.without_kernel("SparseCPU")


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:relation=")
@pytest.mark.parametrize("case", VARIED, indirect=True)
def test_float32_and_the_order_of_sums_are_kept(case, deterministic):
    """The CPU's numbers, and nothing but geometry is float64 where the layer is float32. With
    torch.use_deterministic_algorithms nothing is without an order of its sums; what it gives one is in the docs."""
    watch = Exactly()
    agree(*there(*case.build(torch.float32), watch), 1e-4)
    assert not [name for name in watch.atomic if f"`{name}`" not in PAGE.read_text()]


@pytest.mark.parametrize(
    ("message", "function"),
    [
        ("_to_copy.default made float64 of shape", lambda x: (x[:, :, None] * x[:, None]).double().sum((1, 2))),
        ("cumsum.default is not deterministic", lambda x: x.cumsum(0)),
        ("kthvalue.default is not deterministic", lambda x: x.kthvalue(1).values),
    ],
)
def test_float64_and_loose_orders_are_refused(message, function, deterministic):
    """Negative controls; a sum of whole numbers has one order."""
    x = emulated(torch.randn(2, 90))
    with accelerator(Exactly()):
        run(Call(lambda x: x * x.argsort(1).cumsum(1)), {"x": x})
        with pytest.raises(AssertionError, match=message):
            run(Call(function), {"x": x})


def test_dropout_needs_nothing_from_the_cpu():
    """The seed is drawn on the device, so that a graph drops other weights at every replay."""
    module, inputs = attention(GroupAttention, 4, 5, 6, dropout=0.4).build(torch.float64)
    torch.manual_seed(1)
    expected = run(module, inputs)
    other, _ = there(copy.deepcopy(module), inputs)
    module, inputs = to_accelerator(module), tree_map(emulated, inputs)
    torch.manual_seed(1)
    with accelerator():
        got = tree_map(values, run(module, inputs))
    agree(got, expected, 1e-10)
    assert not torch.allclose(other[0][0], got[0][0])


ONES = torch.ones(2, 3)  # which stays on the CPU


@pytest.mark.parametrize(
    ("message", "function"),
    [
        ("mul.Tensor met a tensor of shape", lambda x: x * ONES),
        ("_local_scalar_dense.default waits", lambda x: x / x.max().item()),
        ("nonzero.default waits", lambda x: x.flatten()[(x.flatten() > 0).nonzero().squeeze(1)]),
        ("index.Tensor with a mask waits", lambda x: x[x > 0]),
        ("repeat_interleave.Tensor waits", lambda x: x[:, 0].repeat_interleave(x.argmax(1))),
        ("tolist waits", lambda x: x * len(x.tolist())),
        ("_to_copy.default to the CPU waits", lambda x: x.cpu()),
        ("_to_copy.default copies from the CPU", lambda x: x * torch.tensor([1.0, 2.0, 3.0], device=x.device)),
        ("_to_copy.default copies from the CPU", lambda x: x[:, [2, 0, 1]]),
        ("copy_.default copies from the CPU", lambda x: torch.zeros_like(x).copy_(ONES) * x),
        ("mm.default has no CUDA kernel for torch.int64", lambda x: x * (x.long().mT @ x.long()).sum()),
        ("_linalg_check_errors.default waits", lambda x: torch.linalg.inv(x @ x.mT + torch.eye(2, device=x.device))),
        ("cat.default met a tensor", lambda x: torch.cat([x, torch.ones(2, 1)], 1)),
    ],
)
def test_what_a_gpu_waits_for_is_refused(message, function):
    """Negative controls, each fine on the CPU."""
    run(Call(function), {"x": torch.randn(2, 3)})
    x = emulated(torch.randn(2, 3))
    with accelerator(), pytest.raises(AssertionError, match=message):
        run(Call(function), {"x": x})


@torch.library.custom_op("tg_equiattn::double_of_a_test", mutates_args=())  # of this namespace bodies are run
def double(x: torch.Tensor) -> torch.Tensor:
    """An operator that reads a value."""
    return 2 * x if bool((x == x).any()) else x.clone()


def test_bodies_of_operators_are_looked_into():
    """Negative control: a value read within an operator, which autograd and the dispatcher see as one node."""
    x = torch.randn(2, 3)
    assert torch.equal(double(x), 2 * x)
    with accelerator(), pytest.raises(AssertionError, match="waits for the device"):
        double(emulated(x))
