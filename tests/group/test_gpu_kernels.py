"""Triton kernels of group attention without a GPU: in Triton's interpreter, and as compiled code that numpy runs."""

import ast

import pytest
import torch
from attention_operands import RELATIONS, table_operands
from interpreter import interpreted

from tg_equiattn.grids import Window
from tg_equiattn.group.windowed import attention_by_tiles
from tg_equiattn.group.windows import MASKED_SCORE, flat_operands

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

pytest.importorskip("triton")

IN_FLOAT64 = """
import torch

from tg_equiattn.functional import use_gpu_kernels
from tg_equiattn.group.windowed import windowed_attention
from tg_equiattn.grids import Window
from tg_equiattn.testing import kernel_errors

errors = kernel_errors("cpu", torch.float64, small=True, only="group")

torch.manual_seed(0)
shapes = ((1, 1, 1, 1, 2, 2),) * 3 + ((1, 1, 9, 2), (1, 0, 2))
tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
settings = None, None, None, Window(2, 3), 0.0
wanted, found = tensors[:4], []
for on in (False, True):
    with use_gpu_kernels(on):
        out, lse = windowed_attention(*tensors, *settings)
    out = out.sin()  # backward runs as forward did, outside of the context
    first = torch.autograd.grad(out.sum(), wanted, retain_graph=True)
    batched = torch.autograd.grad(out, wanted, torch.stack([out, out]), is_grads_batched=True, retain_graph=True)
    recorded = torch.autograd.grad(out.sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in recorded), wanted)
    found.append([out, *first, *batched, *second])
errors["derivatives"] = max(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True))
print(errors)
"""


def test_in_float64():
    """Within rounding: all relations, windows, masks, dropout; derivatives of all orders through the operator."""
    errors = ast.literal_eval(interpreted(IN_FLOAT64))
    assert len(errors) == 6
    assert max(errors.values()) < 1e-12


# image, side, options of the window, masked, dropout, channels, channels of values
WINDOWS = {
    "square": ((3, 4), 3, {}, False, 0.0, 3, 5),
    "masked disk with dropout": ((3, 2), 3, {"shape": "disk"}, True, 0.3, 4, 2),
    "wider than the image": ((2, 3), 5, {"shape": "disk"}, False, 0.0, 2, 3),
    "circular volume with dropout": ((3, 3, 3), 3, {"shape": "disk", "padding_mode": "circular"}, False, 0.4, 3, 4),
    "masked volume": ((2, 3, 2), 3, {"shape": "disk"}, True, 0.0, 4, 4),
    "flat": ((4, 3), (1, 5), {}, False, 0.0, 3, 2),
    "flat, masked volume": ((3, 2, 4), (5, 1, 3), {}, True, 0.0, 2, 3),
    "circular and masked": ((3, 4), 3, {"padding_mode": "circular"}, True, 0.0, 2, 2),
    "far apart": ((5, 6), 3, {}, False, 0.0, 2, 2),
    "many pixels": ((9, 15), 3, {"shape": "disk"}, False, 0.0, 8, 9),
}
ALL = [*RELATIONS, "lifted", "gsa"]


def operands(relation, window, dtype=torch.float32):
    """Operands of the operator, whose keys have several heads and images; some queries have no key."""
    spatial, side, options, masked, dropout, channels, value_channels = WINDOWS[window]
    elements, heads = (3, 2) if relation in ("frame", "lifting", "relative") else (2, 1)
    shape = Window(len(spatial), side, **options)
    tensors, index = table_operands(relation, shape, spatial, elements, heads, channels, value_channels)
    mask = torch.rand(2, *spatial) < 0.5 if masked else None
    settings = index, mask, torch.tensor(11) if dropout else None, shape, 2 if window == "far apart" else 1
    given = *flat_operands(*(x.detach() for x in tensors), *settings), dropout, 1 << 19
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("relation", ALL)
def test_compiled_code(relation, window):
    """The code for a GPU, in float32, and its accesses; against tiles in float64."""
    from ptx import compiled

    from tg_equiattn.group import gpu_kernels

    exact = operands(relation, window, torch.float64)
    given = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in exact]
    tensors = [x.requires_grad_() for x in exact[:5]]
    expected = attention_by_tiles(*tensors, *exact[5:])
    has_keys = expected[1][:, :1, :1, :1] > MASKED_SCORE / 2  # other queries have no gradients
    probes = [torch.randn_like(x) * has_keys for x in expected]
    slopes = torch.autograd.grad(expected, tensors, probes, allow_unused=True, materialize_grads=True)
    with compiled(gpu_kernels, 90):
        found = gpu_kernels.forward(*given)
        found = [*found, *gpu_kernels.backward(*(x.float() for x in probes), *found, *given)]
    for name, a, b in zip(
        ("out", "lse", "one", "k", "v", "table", "elements"), found, [*expected, *slopes], strict=True
    ):
        a, b = (x * has_keys if name in ("out", "lse") else x for x in (a, b.detach()))
        if b.numel():
            assert float((a - b).abs().max()) < 1e-5 * float(b.abs().max()), name


# instructions of the innermost loops of heads of 4, with Triton 3.9: forward, backward of queries, and of keys
INNER = {
    ("frame", 80): (292, 224, 234), ("relative", 80): (299, 164, 238), ("ge_vit", 80): (285, 312, 229),
    ("frame", 90): (300, 232, 246), ("relative", 90): (295, 167, 236), ("ge_vit", 90): (296, 326, 239),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("channels", [4, 8, 16])
@pytest.mark.parametrize("relation", ["frame", "relative", "ge_vit"])
def test_machine_code(relation, channels, arch):
    """Registers are enough, and no memory is shared, for heads of up to 16 channels. Inner loops have the recorded
    number of instructions, to 10 %."""
    import triton
    from ptx import compiled, resources

    from tg_equiattn.group import gpu_kernels

    tensors, index = table_operands(relation, Window(2, 3), (4, 14), 8, 1, channels, channels)
    settings = index, None, torch.tensor(1), Window(2, 3)
    given = *flat_operands(*(x.detach().float() for x in tensors), *settings), 0.1, 1 << 19
    with compiled(gpu_kernels, arch, runs=False) as kernels:
        found = gpu_kernels.forward(*given)
        gpu_kernels.backward(*found, *found, *given)
    for (name, kernel), recorded in zip(kernels.items(), INNER[relation, arch], strict=True):
        (made,) = kernel.made.values()
        registers, spills, shared, inner = resources(made)
        assert (spills, shared) == (0, 0), name
        assert registers <= 255, name
        if channels == 4 and triton.__version__.startswith("3.9."):
            assert abs(inner / recorded - 1) < 0.1, (name, inner)
