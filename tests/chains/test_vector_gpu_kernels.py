"""Triton kernels of vector attention without a GPU: in Triton's interpreter, and as compiled code that numpy runs."""

import ast

import pytest
import torch
from interpreter import interpreted

from tg_equiattn.chains.vector_attention import _features, averages_by_tiles

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

pytest.importorskip("triton")

IN_FLOAT64 = """
import torch

from tg_equiattn.testing import kernel_errors

print(kernel_errors("cpu", torch.float64, small=True, only="vector"))
"""


def test_in_float64():
    """Within rounding."""
    ((name, error),) = ast.literal_eval(interpreted(IN_FLOAT64)).items()
    assert name == "vector attention"
    assert error < 1e-13


COMPILED = """
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tg_equiattn.functional import use_gpu_kernels, vector_attention
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention

names = []


def seen(graph, inputs):
    names.extend(str(node.target) for node in graph.graph.nodes if "tg_equiattn" in str(node.target))
    return make_boxed_func(graph)


layer = GroupAttention(cyclic(2), 2, 2, heads=1, kernel_size=3).double()
for function, shape in ((layer, (1, 2, 2, 3, 3)), (lambda x: vector_attention(*x), (3, 1, 5, 1, 3))):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = function(x)
    with use_gpu_kernels():
        found = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=seen, bw_compiler=seen))(x)
        slopes = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (wanted, found)]
        exported = torch.export.export(layer, (torch.randn(1, 2, 2, 3, 3, dtype=torch.float64),))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*slopes)
print(names)
"""


@pytest.mark.slow
def test_compiled_programs_call_kernels():
    """Forward and backward, of both families."""
    operators = ("group_attention", "group_attention_backward", "vector_attention", "vector_attention_backward")
    assert ast.literal_eval(interpreted(COMPILED)) == [f"tg_equiattn.{name}.default" for name in operators]


def operands(ragged, size):
    """Features, in float32, of random vectors, of which some are parallel."""
    q, k, v = torch.randn(3, 2, 37, 3) * size
    k[:, ::3] = q[:, ::3]
    bias = torch.zeros(2, 1, 37)
    bias[1, :, 9:] = torch.finfo(torch.float32).min / 2
    return [*_features(q, k), (k[..., :, None] * v[..., None, :]).flatten(-2), bias if ragged else None]


# instructions of the innermost loops, with Triton 3.9
INNER = {"_forward": 216, "_backward_of_queries": 325, "_backward_of_keys": 248}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("ragged", "size"), [(False, 0.7), (True, 0.7), (False, 2.0)])
def test_compiled_code(ragged, size, arch):
    """The code for a GPU, in float32, and its accesses, against tiles in float64. It spills no registers and shares no
    memory. Inner loops have the recorded number of instructions, to 10 %."""
    import triton
    from ptx import compiled, resources

    from tg_equiattn.chains import gpu_kernels

    given = operands(ragged, size)
    exact = [x if x is None else x.double() for x in given]
    tensors = [x.requires_grad_() for x in exact[:3]]
    (expected,) = averages_by_tiles(*tensors, exact[3])
    probe = torch.randn_like(expected)
    slopes = torch.autograd.grad(expected, tensors, probe)
    with compiled(gpu_kernels, arch) as kernels:
        (out,) = gpu_kernels.forward(*given)
        found = [out, *gpu_kernels.backward(probe.float(), out, *given)]
    for name, a, b in zip(("out", "queries", "keys", "values"), found, [expected, *slopes], strict=True):
        assert float((a - b).detach().abs().max()) < 2e-5 * float(b.detach().abs().max()), name
    for name, kernel in kernels.items():
        (made,) = kernel.made.values()
        registers, spills, shared, inner = resources(made)
        assert (spills, shared) == (0, 0), name
        assert registers <= 168, name
        if triton.__version__.startswith("3.9."):
            assert abs(inner / INNER[name] - 1) < 0.1, (name, inner)
