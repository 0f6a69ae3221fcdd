"""What leaves escnn: plain torch modules, and by export(model) nothing but torch's standard operators."""

import io

import pytest
import torch
from escnn import gspaces, nn
from tg_equiattn.integrations.escnn import (
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    R2LiftingAttention,
    export,
)

GSPACE = gspaces.flipRot2dOnR2(2)
IMAGE, HIDDEN = (nn.FieldType(GSPACE, 3 * [r]) for r in (GSPACE.trivial_repr, GSPACE.regular_repr))
MODELS = {
    "layer": lambda: R2GroupAttention(HIDDEN, HIDDEN, heads=2, kernel_size=3),
    "random features": lambda: R2GlobalAttention(HIDDEN, HIDDEN, heads=2, kernel_size=3),
    "block": lambda: R2AttentionBlock(R2GroupAttention(HIDDEN, HIDDEN, heads=2, kernel_size=3), crop=1),
    "global block": lambda: R2AttentionBlock(R2GroupAttention(HIDDEN, HIDDEN, heads=2, kernel_size=None), crop=1),
    "mixed": lambda: nn.SequentialModule(
        R2LiftingAttention(IMAGE, HIDDEN, heads=2, kernel_size=3),
        nn.InnerBatchNorm(HIDDEN),
        nn.ReLU(HIDDEN),
        R2GroupAttention(HIDDEN, HIDDEN, heads=2, kernel_size=3, relation="relative"),
        nn.R2Conv(HIDDEN, IMAGE, 3, padding=1),
    ),
}


def exported(name, randomise):
    model = randomise(MODELS[name](), 0.3).eval()
    return model, export(model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", MODELS)
def test_exported_models_trace_and_agree(name, randomise):
    """For other batch sizes too, with no operator of our own."""
    model, plain = exported(name, randomise)
    traced = torch.jit.trace(plain, torch.randn(2, model.in_type.size, 6, 8))
    assert "tg_equiattn::" not in str(traced.inlined_graph)
    x = torch.randn(5, model.in_type.size, 6, 8)
    torch.testing.assert_close(traced(x), model(model.in_type(x)).tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [R2GroupAttention, R2GlobalAttention])
def test_masks_of_both_images(kind, randomise):
    """Exported modules take what layers take. No pixel of the context is valid in the first image."""
    layer = randomise(kind(HIDDEN, HIDDEN, heads=2, kernel_size=3, context_type=HIDDEN)).eval()
    x, context = torch.randn(2, 2, HIDDEN.size, 5, 6)
    mask, seen = torch.rand(2, 2, 5, 6) < 0.7
    seen[0] = False
    wanted = layer(HIDDEN(x), mask, context=HIDDEN(context), context_mask=seen).tensor
    for module in (layer.export(), export(layer)):
        torch.testing.assert_close(module(x, mask, context, seen), wanted, rtol=0, atol=1e-5)
    bias = layer.core.out.bias.repeat_interleave(4)[:, None, None]
    torch.testing.assert_close(wanted[0], torch.where(mask[0], bias, 0.0), rtol=0, atol=1e-6)


def test_without_it_our_operator_is_left(randomise):
    """Negative control."""
    model = MODELS["block"]()
    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(model.export(), torch.randn(2, 12, 6, 8))
    assert "tg_equiattn::" in str(traced.inlined_graph)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "layer"])  # which is in the block
def test_plain_export_to_onnx(name, randomise, tmp_path):
    """Standard operators only, for batches and images of all sizes, in ONNX's own reference implementation."""
    onnx, reference = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference")
    model, plain = exported(name, randomise)
    dynamic = torch.export.Dim.DYNAMIC
    x = torch.randn(2, model.in_type.size, 6, 8)
    torch.onnx.export(plain, (x,), dynamo=True, dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},)).save(
        tmp_path / "m.onnx"
    )
    saved = onnx.load(tmp_path / "m.onnx")
    assert {node.domain for node in saved.graph.node} == {""}
    session = reference.ReferenceEvaluator(saved)
    for shape in ((2, 6, 8), (3, 8, 10), (1, 5, 3)):
        x = torch.randn(shape[0], model.in_type.size, *shape[1:])
        (out,) = session.run(None, {saved.graph.input[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), model(model.in_type(x)).tensor, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", ["layer", "mixed"])
def test_the_exporter_by_torchscript_is_refused(name, randomise):
    """It would make a file for one size."""
    pytest.importorskip("onnx")
    model, plain = exported(name, randomise)
    with pytest.raises(RuntimeError, match=r"images of one size; use torch.onnx.export\(model, inputs, dynamo=True\)"):
        torch.onnx.export(plain, (torch.randn(2, model.in_type.size, 6, 8),), io.BytesIO(), dynamo=False)
