"""Modules on an accelerator, emulated where there is none: the CPU's numbers, nothing left on the CPU, no waiting."""

import pytest
import torch
from cases import CASES, Call, agree, attention, run
from emulated import accelerator, emulated, to_accelerator, values
from torch import nn
from torch.utils._pytree import tree_map

from tg_equiattn.nn import GroupAttention

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# float32 of one case a name: its variants convert numbers where the first does
DTYPES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}",
                 marks=pytest.mark.slow if dtype == torch.float32 and " " in name else ())
    for name in CASES for dtype in TOLERANCE
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:relation=")
@pytest.mark.parametrize(("case", "dtype"), DTYPES, indirect=["case"])
def test_an_accelerator_gives_the_cpus_numbers(case, dtype):
    """And copies nothing there, as a CUDA graph needs."""
    module, inputs = case.build(dtype)
    expected = run(module, inputs)
    there, moved = to_accelerator(module), tree_map(emulated, inputs)
    with accelerator():
        got = tree_map(values, run(there, moved))
    agree(got, expected, TOLERANCE[dtype])


def test_dropout_needs_nothing_from_the_cpu():
    """The seed is drawn on the device, so that a graph drops other weights at every replay."""
    case = attention(GroupAttention, 4, 5, 6, dropout=0.4)
    module, inputs = case.build(torch.float64)
    torch.manual_seed(1)
    expected = run(module, inputs)
    there, moved = to_accelerator(module), tree_map(emulated, inputs)
    with accelerator():
        other = run(there, moved)
        torch.manual_seed(1)
        got = tree_map(values, run(there, moved))
    agree(got, expected, 1e-10)
    assert not torch.allclose(values(other[0][0]), got[0][0])


class Hidden(nn.Module):
    """A table that is no buffer, and stays where it was made."""

    def __init__(self):
        super().__init__()
        self.table = torch.ones(3)

    def forward(self, x):
        return x * self.table


def constant(x):
    return x * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype, device=x.device)


@pytest.mark.parametrize(
    ("message", "module"),
    [
        ("mul.Tensor met a tensor of shape", Hidden()),
        ("_local_scalar_dense.default waits", Call(lambda x: x / x.max().item())),
        ("_local_scalar_dense.default waits", Call(lambda x: x if bool((x > 0).all()) else -x)),
        ("nonzero.default waits", Call(lambda x: x.flatten()[(x.flatten() > 0).nonzero().squeeze(1)])),
        ("index.Tensor with a mask waits", Call(lambda x: x[x > 0])),
        ("masked_select.default waits", Call(lambda x: x.masked_select(x > 0))),
        ("repeat_interleave.Tensor waits", Call(lambda x: x[:, 0].repeat_interleave(x.argmax(1)))),
        ("tolist waits", Call(lambda x: x * len(x.tolist()))),
        ("_to_copy.default to the CPU waits", Call(lambda x: x.cpu())),
        ("_to_copy.default copies from the CPU", Call(constant)),
        ("_to_copy.default copies from the CPU", Call(lambda x: x[:, [2, 0, 1]])),
        ("copy_.default copies from the CPU", Call(lambda x: torch.zeros_like(x).copy_(torch.ones(2, 3)) * x)),
    ],
)
def test_what_a_gpu_waits_for_is_refused(message, module):
    """Negative controls, each fine on the CPU."""
    run(module, {"x": torch.randn(2, 3)})
    x = emulated(torch.randn(2, 3))
    with accelerator(), pytest.raises(AssertionError, match=message):
        run(module, {"x": x})


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
