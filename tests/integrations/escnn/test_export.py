"""What leaves escnn: plain torch modules, and by to_standard_torch(model) nothing but torch's standard operators."""

import copy
import io

import pytest
import torch
from escnn import gspaces, nn
from escnn_unet import UNet
from fields import GSPACES, of, regular
from tg_equiattn.integrations.escnn import (
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    R2LiftingAttention,
    between_fields,
    to_standard_torch,
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
    return model, to_standard_torch(model)


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
    for module in (layer.export(), to_standard_torch(layer)):
        torch.testing.assert_close(module(x, mask, context, seen), wanted, rtol=0, atol=1e-5)
    bias = layer.core.out.bias.repeat_interleave(4)[:, None, None]
    torch.testing.assert_close(wanted[0], torch.where(mask[0], bias, 0.0), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_without_it_models_are_not_traced():
    with pytest.raises(NotImplementedError, match=r"can be traced after to_standard_torch\(model\)"):
        torch.jit.trace(MODELS["block"]().export(), torch.randn(2, 12, 6, 8))


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


class Segmentation(torch.nn.Module):
    """A U-Net that takes images and masks."""

    def __init__(self, gspace):
        super().__init__()
        self.net = UNet(gspace)

    def forward(self, x, mask=None):
        return self.net(self.net.image(x), mask).tensor


@pytest.mark.parametrize("name", ["rot4", "half turns"])
def test_modules_with_skips_masks_and_several_inputs(name, randomise):
    """The copy does not follow the model, which stays as it is."""
    gspace = GSPACES[name]
    model, sides = randomise(Segmentation(gspace)).eval(), (8, 12, 4)[: gspace.dimensionality]
    x, mask = torch.randn(2, 1, *sides), torch.rand(2, *sides) < 0.8
    wanted, state = model(x, mask), copy.deepcopy(model.state_dict())
    plain = to_standard_torch(model)
    torch.testing.assert_close(plain(x, mask), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-5)
    assert all(type(part).__module__.partition(".")[0] != "escnn" for part in plain.modules())
    assert not any(getattr(part, "plain", False) for part in model.modules())
    for value in model.parameters():
        value.data.zero_()
    torch.testing.assert_close(plain(x, mask), wanted, rtol=0, atol=1e-5)
    model.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_a_program_of_a_unet_serves_sides_up_to_the_windows(randomise):
    """Batches of one, and sides with which the coarsest level has two pixels a side."""
    model = randomise(Segmentation(GSPACES["rot4"])).eval()
    batch, rows, columns = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    shapes = ({0: batch, 2: 4 * rows, 3: 4 * columns}, {0: batch, 1: 4 * rows, 2: 4 * columns})
    example = torch.randn(2, 1, 16, 24), torch.ones(2, 16, 24, dtype=torch.bool)
    program = torch.export.export(to_standard_torch(model), example, dynamic_shapes=shapes).module()
    for shape in ((3, 12, 20), (1, 8, 8), (1, 8, 32)):
        x, mask = torch.randn(shape[0], 1, *shape[1:]), torch.rand(shape) < 0.8
        torch.testing.assert_close(program(x, mask), model(x, mask), rtol=0, atol=1e-5)


class Residual(nn.EquivariantModule):
    """Somebody's module, with no export of its own."""

    def __init__(self, field_type):
        super().__init__()
        self.in_type = self.out_type = field_type
        self.branch = of(field_type.gspace, "Conv")(field_type, field_type, 3, padding=1)

    def forward(self, input):
        return input + self.branch(input)

    def evaluate_output_shape(self, input_shape):
        return input_shape


class Twice(nn.SequentialModule):
    """Somebody's sequence, for which the export of its parent is wrong."""

    def forward(self, input):
        return super().forward(super().forward(input))


WAVES = nn.FieldType(GSPACE, 2 * [GSPACE.irrep(1, 1)])
SOLID = regular(GSPACES["mirror"], 2)
PARTS = {
    "residual": lambda: Residual(HIDDEN),
    "residual of volumes": lambda: Residual(SOLID),
    "sequence of residuals": lambda: nn.SequentialModule(Residual(HIDDEN), nn.ReLU(HIDDEN)),
    "twice": lambda: Twice(nn.R2Conv(HIDDEN, HIDDEN, 3, padding=1)),
    "gates": lambda: nn.NormNonLinearity(WAVES),
    "circular": lambda: nn.SequentialModule(nn.R2Conv(HIDDEN, HIDDEN, 3, padding=1, padding_mode="circular")),
    "between fields": lambda: between_fields(WAVES, nn.PointwiseAdaptiveAvgPool2D(HIDDEN, 2), WAVES),
    "torch's sequence": lambda: torch.nn.Sequential(
        R2GroupAttention(HIDDEN, HIDDEN, heads=2, kernel_size=3), nn.InnerBatchNorm(HIDDEN), nn.GroupPooling(HIDDEN)
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_modules_that_escnn_does_not_export(name, randomise):
    """It takes tensors, and fields in torch's sequences."""
    model = randomise(PARTS[name]()).eval()
    in_type = getattr(model, "in_type", HIDDEN)
    x = in_type(torch.randn(2, in_type.size, *(6, 5, 4)[: in_type.gspace.dimensionality]))
    wanted, plain = model(x), to_standard_torch(model)
    torch.testing.assert_close(plain(x.tensor), wanted.tensor, rtol=0, atol=1e-5)
    if name in ("residual", "torch's sequence"):
        out = plain(x)
        assert out.type == wanted.type
        torch.testing.assert_close(out.tensor, wanted.tensor, rtol=0, atol=1e-5)


def test_what_is_not_a_module_is_refused():
    with pytest.raises(ValueError, match=r"module must be a torch\.nn\.Module, got ABCMeta"):
        to_standard_torch(R2GroupAttention)
