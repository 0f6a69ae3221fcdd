"""What the escnn layers refuse, with what to use in place of it."""

import pytest
import torch
from escnn import gspaces, nn
from fields import regular, trivial
from tg_equiattn.integrations.escnn import (
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    R2LiftingAttention,
    R2RegularLayerNorm,
    R3AttentionBlock,
    R3GroupAttention,
    R3LiftingAttention,
    R3RegularLayerNorm,
    between_fields,
    group_from_gspace,
)

ROT, FLIP, CONTINUOUS = gspaces.rot2dOnR2(4), gspaces.flip2dOnR2(), gspaces.rot2dOnR2()
SPACE, CIRCLE = gspaces.rot2dOnR3(4), gspaces.rot2dOnR3()


def vectors(gspace):
    return nn.FieldType(gspace, [gspace.trivial_repr, gspace.irrep(1)])


HIDDEN, IMAGE, WAVES = regular(ROT), trivial(ROT), nn.FieldType(ROT, [ROT.irrep(1)])
MIXED = nn.FieldType(ROT, [*vectors(ROT).representations, ROT.regular_repr])
LAYER = R2GroupAttention(HIDDEN, HIDDEN, heads=1, kernel_size=3)
WITH_CONTEXT = R2GroupAttention(HIDDEN, HIDDEN, heads=2, kernel_size=3, context_type=regular(ROT, 2))
X = HIDDEN(torch.randn(1, 24, 5, 5))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"in_type must consist of trivial fields, .*; use R2GroupAttention, which takes .*R2Conv\(in_type, fields, "
         r"kernel_size=1\), .*trivial_repr", lambda: R2LiftingAttention(HIDDEN, HIDDEN)),
        (r"out_type must consist of regular fields, .* escnn.nn.R2Conv\(fields, out_type, kernel_size=1\)",
         lambda: R2LiftingAttention(IMAGE, IMAGE)),
        (r"use R2GroupAttention after escnn.nn.R2Conv\(in_type, fields, kernel_size=1\), .*regular_repr.* or keep only "
         r"the invariant part, with escnn.nn.R2Conv\(in_type, .*trivial_repr",
         lambda: R2LiftingAttention(MIXED, HIDDEN)),
        (r"convert with escnn.nn.R2Conv\(in_type, fields, kernel_size=1\), .*regular_repr",
         lambda: R2GroupAttention(MIXED, HIDDEN)),
        (r"convert with escnn.nn.R2Conv\(fields, out_type, kernel_size=1\), .*regular_repr",
         lambda: R2GroupAttention(HIDDEN, MIXED)),
        (r"lift trivial fields with R3LiftingAttention, or convert with escnn.nn.R3Conv\(in_type, fields",
         lambda: R3GroupAttention(trivial(SPACE), regular(SPACE))),
        ("out_type must have the gspace of in_type", lambda: R2GroupAttention(HIDDEN, regular(FLIP))),
        (r"gspace must be discrete, got SO\(2\).*RestrictionModule\(fields, N\), N > 0, .* then equivariant to C_N",
         lambda: group_from_gspace(CONTINUOUS)),
        (r"RestrictionModule\(fields, \(axis, N\)\).* to D_N", lambda: group_from_gspace(gspaces.flipRot2dOnR2())),
        (r"RestrictionModule\(fields, 'octa'\).*rotations of the cube", lambda: group_from_gspace(gspaces.rot3dOnR3())),
        (r"RestrictionModule\(fields, \(True, 'octa'\)\)",
         lambda: R3RegularLayerNorm(trivial(gspaces.flipRot3dOnR3()))),
        ("gspace must be discrete, got .*; use a discrete gspace, n > 0",
         lambda: R3LiftingAttention(trivial(CIRCLE), trivial(CIRCLE))),
        ("gspace must be one of images or volumes", lambda: group_from_gspace(gspaces.no_base_space(ROT.fibergroup))),
        ("gspace must be an escnn.gspaces.GSpace, got str", lambda: group_from_gspace("rot")),
        (r"in_type must have a gspace of dimensionality 2, got .*; use R3GroupAttention",
         lambda: R2GroupAttention(regular(SPACE), regular(SPACE))),
        ("attention must have a gspace of dimensionality 3, .*; use R2AttentionBlock", lambda: R3AttentionBlock(LAYER)),
        ("attention must be an R2GroupAttention or an R2GlobalAttention, got R2LiftingAttention",
         lambda: R2AttentionBlock(R2LiftingAttention(IMAGE, HIDDEN))),
        ("input must be a GeometricTensor of type", lambda: LAYER(IMAGE(torch.randn(1, 3, 5, 5)))),
        ("at least one pixel", lambda: LAYER(HIDDEN(torch.randn(1, 24, 0, 5)))),
        ("size must have 2 sides of the test image or volume, got 4", lambda: LAYER.check_equivariance(size=4)),
        (r"gspace must have elements .* check_equivariance\(off_lattice=True\)",
         lambda: R2RegularLayerNorm(regular(gspaces.rot2dOnR2(3))).check_equivariance()),
        ("context must be a GeometricTensor of type .* got", lambda: WITH_CONTEXT(X, context=X)),
        (r"context must be given, with fields of context_type, .*got None; .*context_type=None",
         lambda: WITH_CONTEXT(X)),
        ("context_type must be given with norm='batch', .*or use norm='layer'",
         lambda: R2AttentionBlock(LAYER)(X, context=X)),
        ("context_type must have the gspace of in_type",
         lambda: R2GroupAttention(HIDDEN, HIDDEN, context_type=regular(FLIP))),
        ("context_type must consist of regular fields", lambda: R2GlobalAttention(HIDDEN, HIDDEN, context_type=IMAGE)),
        ("layer must be an escnn.nn.EquivariantModule, got Identity",
         lambda: between_fields(HIDDEN, torch.nn.Identity(), HIDDEN)),
        ("out_type must have the gspace of the layer", lambda: between_fields(HIDDEN, LAYER, regular(FLIP))),
        ("in_type must share an irreducible representation with the layer's",
         lambda: between_fields(WAVES, R2LiftingAttention(IMAGE, HIDDEN), HIDDEN)),
    ],
)  # fmt: skip
def test_bad_arguments(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_fields_that_are_right_need_no_maps_between():
    assert [type(m) for m in between_fields(HIDDEN, LAYER, HIDDEN)] == [R2GroupAttention]
    assert "[C4_on_R2[(None, 4)]: {regular (x6)}(24)]" in repr(LAYER)


def test_the_kernel_size_may_be_positional():
    for kind, in_type in ((R2LiftingAttention, IMAGE), (R2GroupAttention, HIDDEN), (R2GlobalAttention, HIDDEN)):
        assert kind(in_type, HIDDEN, 3).core.window.kernel_size == 3
