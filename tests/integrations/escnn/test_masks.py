"""Masks through whole escnn models: a padded image has the outputs of the image alone, and the symmetry is exact."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from escnn import nn
from escnn_unet import UNet, conv
from fields import GSPACES, field, regular
from tg_equiattn.integrations.escnn import (
    MaskedSequential,
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    between_fields,
    group_from_gspace,
)

from tg_equiattn.testing import act

ROT, VOLUMES = GSPACES["rot4"], GSPACES["half turns"]
CLOSE = {"rtol": 0, "atol": 1e-10}


def padded(x, before, after):
    return F.pad(x, [before, after] * (x.ndim - 2))


def alone(out, before, shape):
    """The part of an output that belongs to the image alone, which begins at this row and column."""
    for axis, side in enumerate(shape[2:], 2):
        out = out.narrow(axis, before, side)
    return out


def turned(mask, gspace, element):
    index = list(gspace.fibergroup.elements).index(element)
    return act(mask[:, None].double(), group_from_gspace(gspace), index)[:, 0] > 0.5


UNETS = ["rot4", pytest.param("flipRot4", marks=pytest.mark.slow), "half turns"]


@pytest.mark.parametrize("name", UNETS)
def test_a_padded_image_in_a_unet_is_the_image_alone(name, randomise):
    """In eval mode and in training; NaN in the padding does not matter. Where convolutions and norms do not see the
    mask, the check fails."""
    gspace = GSPACES[name]
    model = randomise(UNet(gspace)).double()
    x = field(model.image, 2, *((8, 12) if gspace.dimensionality == 2 else (4, 8, 4))).tensor
    mask = padded(torch.ones_like(x), 4, 8)[:, 0] > 0
    wide = padded(x, 4, 8)
    nan = torch.where(mask[:, None], wide, math.nan)
    for training in (False, True):
        model.train(training)
        small, large, control = (copy.deepcopy(model.state_dict()) for _ in range(3))
        outs, states = [], []
        for state, image, seen in ((small, x, None), (large, nan, mask), (control, wide, mask)):
            model.load_state_dict(state, strict=False)
            outs.append(model(model.image(image), seen, in_convolutions=state is not control).tensor)
            states.append(copy.deepcopy(model.state_dict()))
        torch.testing.assert_close(alone(outs[1], 4, x.shape), outs[0], **CLOSE)
        assert not outs[1][~mask[:, None]].any()
        for key, value in states[0].items():
            torch.testing.assert_close(states[1][key], value, rtol=1e-10, atol=1e-10)
        assert (alone(outs[2], 4, x.shape) - outs[0]).abs().max() > 1e-2
    single = model.eval().float()
    expected = single(model.image(x.float()), None).tensor
    out = single(model.image(wide.float()), mask).tensor
    torch.testing.assert_close(
        alone(out, 4, x.shape), expected, rtol=0, atol=1e-6 * float(expected.detach().abs().max())
    )


@pytest.mark.parametrize("name", UNETS)
def test_a_masked_unet_under_escnns_transform(name, randomise):
    """For every element, with a mask with holes; where the mask stays as it is, the check fails. escnn's kernels are
    symmetric to the precision of float32."""
    gspace = GSPACES[name]
    model, shape = randomise(UNet(gspace)).double().eval(), (2, *(8, 8, 8)[: gspace.dimensionality])
    x, mask = field(model.image, *shape), torch.rand(shape) < 0.8
    out = model(x, mask)
    scale = out.tensor.detach().abs().max()
    for element in gspace.fibergroup.elements:
        target = out.transform(element).tensor
        got = model(x.transform(element), turned(mask, gspace, element)).tensor
        assert (got - target).abs().max() < 1e-6 * scale
        if element != gspace.fibergroup.identity:
            assert (model(x.transform(element), mask).tensor - target).abs().max() > 1e-2 * scale


class PlusMean(nn.EquivariantModule):
    """Somebody's own module, which knows what to do with masks."""

    def __init__(self, field_type):
        super().__init__()
        self.in_type = self.out_type = field_type

    def forward(self, input, mask=None):
        weight = torch.ones_like(input.tensor) if mask is None else mask[:, None].to(input.tensor)
        mean = (input.tensor * weight).sum((2, 3), True) / weight.sum((2, 3), True)
        return input + self.in_type(mean.expand_as(input.tensor))

    def evaluate_output_shape(self, input_shape):
        return input_shape


HIDDEN, DEEP = regular(ROT, 2), regular(VOLUMES, 2)
VECTORS = nn.FieldType(ROT, 2 * [ROT.irrep(1)])
MODULES = {  # with sides of an image that the strides fit, and by how much outputs are smaller
    "convolution without padding": (lambda: conv(HIDDEN, HIDDEN, 3), (7, 8)),
    "stride": (lambda: conv(HIDDEN, HIDDEN, 3, padding=1, stride=2), (7, 9)),
    "stride without padding": (lambda: conv(HIDDEN, HIDDEN, 3, stride=2), (7, 9)),
    "even kernel": (lambda: conv(HIDDEN, HIDDEN, 4, stride=2, padding=1), (6, 8)),
    "dilation": (lambda: conv(HIDDEN, HIDDEN, 3, padding=2, dilation=2), (6, 7)),
    "volume": (lambda: conv(DEEP, DEEP, 3, padding=1, stride=2), (3, 5, 5)),
    "max": (lambda: nn.PointwiseMaxPool2D(HIDDEN, 3, stride=2, padding=1), (7, 9)),
    "max of volumes": (lambda: nn.PointwiseMaxPool3D(DEEP, 2), (4, 2, 4)),
    "mean": (lambda: nn.PointwiseAvgPool2D(HIDDEN, 2), (6, 8)),
    "mean with padding": (lambda: nn.PointwiseAvgPool2D(HIDDEN, 3, stride=1, padding=1), (6, 7)),
    "mean of volumes": (lambda: nn.PointwiseAvgPool3D(DEEP, 2), (4, 2, 4)),
    "blur": (lambda: nn.PointwiseAvgPoolAntialiased2D(HIDDEN, 0.6, 2), (7, 9)),
    "nearest": (lambda: nn.R2Upsampling(HIDDEN, 3, mode="nearest"), (3, 4)),
    "bilinear": (lambda: nn.R2Upsampling(HIDDEN, 3), (3, 4)),
    "trilinear": (lambda: nn.R3Upsampling(DEEP, 2), (3, 4, 2)),
    "gates": (lambda: nn.NormNonLinearity(VECTORS), (4, 5)),
    "inner batch norm": (lambda: nn.InnerBatchNorm(HIDDEN), (4, 5)),
    "inner batch norm of the batch": (lambda: nn.InnerBatchNorm(HIDDEN, track_running_stats=False), (4, 5)),
    "inner batch norm of volumes": (lambda: nn.InnerBatchNorm(DEEP), (4, 2, 5)),
    "batch norm of irreps": (lambda: nn.IIDBatchNorm2d(nn.FieldType(ROT, [ROT.irrep(1), ROT.trivial_repr])), (4, 5)),
    "batch norm of lengths": (lambda: nn.NormBatchNorm(VECTORS), (4, 5)),
    "somebody's own": (lambda: PlusMean(HIDDEN), (4, 5)),
    "between fields": (lambda: between_fields(VECTORS, nn.InnerBatchNorm(HIDDEN), VECTORS), (4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_every_module_treats_padding_as_the_outside(name, randomise):
    """Outputs, gradients and statistics; in training, eval mode and, where escnn has it, export."""
    make, sides = MODULES[name]
    module = MaskedSequential(randomise(make())).double()
    start, x = copy.deepcopy(module.state_dict()), field(module.in_type, 2, *sides).tensor.requires_grad_()
    learned = [x, *(p for p in module.parameters() if p.requires_grad)]
    wide, mask = padded(x, 0, 6), padded(torch.ones_like(x), 0, 6)[:, 0] > 0
    for training in (True, False):
        results = []
        for image, seen in ((x, None), (wide, mask)):
            module.train().load_state_dict(start, strict=False)
            out = module.train(training)(module.in_type(image), seen).tensor
            valid = torch.ones_like(out) > 0 if seen is None else module.mask_after(mask)[:, None].expand_as(out)
            assert not out[~valid].any()
            weights = torch.arange(int(valid.sum())).to(out).cos()
            grads = torch.autograd.grad((out[valid] * weights).sum(), learned, retain_graph=True, allow_unused=True)
            results.append((out[valid], grads, copy.deepcopy(module.state_dict())))
        for got, wanted in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, wanted, **CLOSE)
    try:
        plain = module.export()
    except ValueError:  # batch norms without running statistics
        return
    if not any(hasattr(part, "in_type") for part in plain.modules()):  # escnn has an export of every module
        plain = pickle.loads(pickle.dumps(plain))
    torch.testing.assert_close(plain(x).flatten(), results[0][0], **CLOSE)
    torch.testing.assert_close(plain(wide, mask), out, **CLOSE)
    assert bool((plain.mask_after(mask) == module.mask_after(mask)).all())


def test_an_image_without_valid_pixels():
    module = MaskedSequential(conv(HIDDEN, HIDDEN, 3, padding=1), nn.InnerBatchNorm(HIDDEN)).double()
    x = field(HIDDEN, 2, 4, 4)
    assert not module(x, torch.zeros(1, 4, 4, dtype=torch.bool)).tensor.any()


@pytest.mark.parametrize(
    ("message", "module"),
    [
        ("padding_mode='circular' in R2Conv.*use padding_mode='zeros'",
         lambda: conv(HIDDEN, HIDDEN, 3, padding=1, padding_mode="circular")),
        *((f"padding_mode='circular' in {kind.__name__}, got a mask.*use padding_mode='mask'",
           lambda kind=kind: kind(HIDDEN, HIDDEN, 3, heads=2, padding_mode="circular"))
          for kind in (R2GroupAttention, R2GlobalAttention)),
        ("padding_mode='circular' in R2AttentionBlock", lambda: R2AttentionBlock(
            R2GroupAttention(HIDDEN, HIDDEN, 3, heads=2, padding_mode="circular"))),
        ("padding=2 .*use less padding", lambda: conv(HIDDEN, HIDDEN, 3, padding=2)),
        ("ceil_mode=True in PointwiseMaxPool2D.*ceil_mode=False",
         lambda: nn.PointwiseMaxPool2D(HIDDEN, 2, ceil_mode=True)),
        ("align_corners=True in R2Upsampling.*use an integer",
         lambda: nn.R2Upsampling(HIDDEN, 2, align_corners=True)),
        ("scale_factor=None .*use an integer scale_factor", lambda: nn.R2Upsampling(HIDDEN, size=8)),
        (r"mask must be None with PointwiseAdaptiveAvgPool2D in a MaskedSequential, .*forward\(input, mask\)",
         lambda: nn.PointwiseAdaptiveAvgPool2D(HIDDEN, 1)),
    ],
)  # fmt: skip
def test_modules_that_are_refused(message, module):
    """With a mask only, before and after the export."""
    model, x = MaskedSequential(module()), HIDDEN(torch.randn(1, 8, 6, 6))
    for call, image in ((model, x), (model.export(), x.tensor)):
        call(image)
        with pytest.raises(ValueError, match=message):
            call(image, torch.ones(1, 6, 6, dtype=torch.bool))


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match="mask must"):
        MaskedSequential(nn.ReLU(HIDDEN))(HIDDEN(torch.randn(1, 8, 6, 6)), torch.ones(1, 6, 5, dtype=torch.bool))
