"""What layers, blocks and models of images refuse: each error names the argument."""

import pytest
import torch
from group_layers import attention, block, everywhere, image, lifting

from tg_equiattn.encodings import relation_index
from tg_equiattn.groups import cyclic, dyadic
from tg_equiattn.nn import (
    GlobalGroupAttention,
    GlobalPooling,
    GroupAttentionBlock,
    GroupLinear,
    GroupTransformer,
    RegularGlobalNorm,
    RegularLayerNorm,
)
from tg_equiattn.nn.group.linear import Pointwise
from tg_equiattn.nn.group.norm import RegularBatchNorm
from tg_equiattn.nn.group.pooling import SpatialCrop, SpatialMaxPool
from tg_equiattn.testing import off_lattice_errors

C4, SCALES, X = cyclic(4), dyadic(3, cyclic(4)), torch.zeros(2, 3, 4, 4, 5)
NORMS = RegularGlobalNorm, RegularLayerNorm, RegularBatchNorm
FINITE = "group must be finite, without scales"


def made(**change):
    return lambda: attention(C4, **change)


def far(**change):
    return lambda: everywhere(C4, **change)


def scaled(kind=attention, **change):
    return lambda: kind(SCALES, **change)


def model(group=C4, **change):
    options = {"in_channels": 1, "num_classes": 5, "channels": (6, 8), "heads": 2, "kernel_size": 3} | change
    return lambda: GroupTransformer(group, **options)


def given(layer, *shape, **options):
    return lambda: layer(torch.zeros(*shape, **options))


def circular(group, kernel_size, *sides):
    layer = lifting(group, padding_mode="circular", kernel_size=kernel_size)
    return lambda: layer(image(group, sides, False, torch.float32))


def pixel(*place):
    return lambda: attention(C4).attention_map(torch.zeros(2, 3, 4, 4, 5), place)


def errors(module, *shape):
    return lambda: off_lattice_errors(module, cyclic(8), shape)


REFUSED = [
    ("heads must be a positive integer, got 0", made(heads=0)),
    ("head_channels must be a positive integer, got -1", made(head_channels=-1)),
    ("kernel_size must be a positive odd integer or None .* got 4", made(kernel_size=4)),
    *((f"{name} must be one of .* got 'ring'", made(**{name: "ring"}))
      for name in ("relation", "encoding", "window_shape")),
    (r"dropout must be in \[0, 1\), got 'a'", made(dropout="a")),
    ("content_heads must be an integer from 0 to heads=2, got 3", made(content_heads=3)),
    ("content_heads=1 needs locality: heads without content", made(content_heads=1, locality=None)),
    *(("content_heads must be at least 1 with a context, got 0", lambda kind=kind: kind(
        C4, context_channels=5, content_heads=0)) for kind in (lifting, attention)),
    *(("context must be None with content_heads=0, got torch.float32 of shape", lambda kind=kind, size=size: kind(
        C4, content_heads=0, kernel_size=size)(X, context=X)) for kind in (attention, block) for size in (3, None)),
    ("context must be None with content_heads=0", lambda: attention(C4, content_heads=0).attention_map(
        X, (1, 1), context=X)),
    ("content_heads must be None or heads=2 unless relation is 'frame'", made(content_heads=1, relation="ge_vit")),
    ("locality must be .*a finite number of at least 0, got '4'", made(locality="4")),
    ("padding_mode must be 'mask' where kernel_size is None", made(padding_mode="circular", kernel_size=None)),
    (r"padding_mode must be one of \('mask', 'circular'\), got 'zeros'", lambda: lifting(C4, padding_mode="zeros")),
    (r"kernel_size must be at most 5 with padding_mode='circular' .* got 7", circular(C4, 7, 2, 5)),
    (r"input must have shape \(B, 3, 4, H, W\), got \(2, 3, 3, 5, 5\)", given(attention(C4), 2, 3, 3, 5, 5)),
    ("must be torch.float32 as the parameters are", given(attention(C4), 2, 3, 4, 5, 5, dtype=torch.float64)),
    ("pixel must be 2 integers, or a list of such pixels", pixel(1, 2, 3)),
    (r"pixel must be in an image of \(4, 5\) pixels, .* got \(4, 0\)", pixel(4, 0)),
    ("kernel_size must be a positive odd integer: the window .* got None", far(kernel_size=None)),
    (r"relation must be one of \('frame', 'relative'\), got 'ge_vit'", far(relation="ge_vit")),
    *((f"{name} must be a positive integer, got 0", far(**{name: 0}))
      for name in ("num_random_features", "redraw_interval", "context_channels")),
    *((f"relation must be 'relative'.*got '{r}'.*different pixels", scaled(relation=r))
      for r in ("ge_vit", "lifted", "gsa")),
    *(("kernel_size must be a positive odd integer for groups of scales", scaled(kind, kernel_size=None))
      for kind in (lifting, attention)),
    *((f"scale_window must be an odd integer from 1 to 5.*got {w}", scaled(scale_window=w))
      for w in (0, 2, 7, -1, 1.0, True)),
    ("scale_window must be None without a group of scales .* got 3", made(scale_window=3)),
    (FINITE, lambda: GlobalGroupAttention(SCALES, 3, 6)),
    (FINITE, lambda: relation_index(SCALES)),
    (FINITE, model(SCALES, attn_type="global")),
    *((f"isometries must be a .*FiniteGroup, got .*{other!r:.6}", lambda other=other: dyadic(2, other))
      for other in ("C4", SCALES)),
    ("norm must be 'batch' or 'layer' for groups of scales", scaled(block, norm="global")),
    ("crop must be .* for groups of scales.*twice as large", scaled(block, crop=1)),
    ("crops must be .* for groups of scales.*twice as large", model(SCALES, crops=(1, 0))),
    ("pools must be .* for groups of scales.*twice as large", model(SCALES, pools=(1,))),
    (r"input sides must be multiples of the largest scale, 4.*\(4, 6\)", circular(SCALES, 3, 4, 6)),
    ("kernel_size must be at most", circular(SCALES, 5, 4, 4)),
    (r"dropout must be in \[0, 1\), got 1.0", lambda: GroupAttentionBlock(attention(C4), dropout=1.0)),
    ("channels must hold the width of at least one block, got 8", model(channels=8)),
    (r"channels\[1\] must be a positive integer, got 0", model(channels=(8, 0))),
    ("lifting_channels must be a positive integer, got 0", model(lifting_channels=0)),
    ("pools must be block numbers from 0 to 2", model(pools=(1.5,))),
    (r"crops must be one number or 2 \(one for each block\), got \(1,\)", model(crops=(1,))),
    (r"input_dropout must be in \[0, 1\), got 1.5", model(input_dropout=1.5)),
    ("num_classes must be a positive integer, got 0", model(num_classes=0)),
    ("attn_type must be one of .* got 'exact'", model(attn_type="exact")),
    ("attn_kwargs must not have context_channels", model(attn_kwargs={"context_channels": 3})),
    ("norm must be one of .* got 'group'", model(norm="group")),
    (r"input must have shape \(B, 1, H, W\), got \(2, 3, 8, 8\)", given(model()(), 2, 3, 8, 8)),
    ("multiples of the pool's kernel_size=2", given(model(pools=(0,))(), 2, 1, 9, 9)),
    *((message, lambda module=module, change=change: module()(X, torch.ones(2, 4, 5, dtype=torch.bool).to(**change)))
      for message, change in ((r"mask must be bool of shape \(2 or 1, 4, 5\), .* got torch.float32 of shape",
                               {"dtype": torch.float32}),
                              ("mask must be on cpu as the input is, got meta", {"device": "meta"}))
      for module in (lambda: attention(C4), lambda: block(C4), *(lambda n=n: n(3) for n in NORMS), GlobalPooling,
                     lambda: SpatialMaxPool(1), lambda: SpatialCrop(1),
                     lambda: lambda x, mask: block(C4).attention_map(x, (1, 1), mask),
                     lambda: lambda x, mask: model(in_channels=3)()(x[:, :, 0], mask))),
    *((message, lambda kind=kind, mask=mask, context=context: kind(C4, context_channels=5)(X, mask, context=context))
      for message, context in (
          (r"context must have shape \(B, 5, 4, H, W\), got \(2, 3, 4, 4, 5\)", X),
          (r"context must have the batch and the pixels of the input, \(2, 3, 4, 4, 5\)", torch.ones(2, 5, 4, 5, 4)),
          ("context must be torch.float32 as the parameters are", torch.ones(2, 5, 4, 4, 5).double()),
          ("context must be given, with context_channels=5, got None", None),
          ("context must be a torch.Tensor of shape .* got str", "x"))
      for kind in (attention, block) for mask in (None, torch.ones(2, 4, 5, dtype=torch.bool))),
    ("in_channels must be", lambda: GroupLinear(C4, 0, 3)),
    ("out_channels must be", lambda: GroupLinear(C4, 3, 0)),
    (r"input must have shape \(B, 3, 4, ...\), got \(2, 3, 5, 6\)", given(GroupLinear(C4, 3, 5), 2, 3, 5, 6)),
    ("channels must be a positive integer, got 0", lambda: RegularGlobalNorm(0)),
    (r"input must have shape \(B, 3, ...\), got \(2, 4, 4\)", given(RegularGlobalNorm(3), 2, 4, 4)),
    *((f"{n} must be one of .* got 'median'", lambda n=n: GlobalPooling(**{n: "median"})) for n in ("group", "space")),
    ("kernel_size must be a positive integer, got 0", lambda: SpatialMaxPool(0)),
    (r"multiples of the pool's kernel_size=2, got \(5, 5\); change the size", given(SpatialMaxPool(2), 2, 3, 4, 5, 5)),
    ("crop must be a non-negative integer, got -1", lambda: SpatialCrop(-1)),
    ("in_channels must be a positive integer, got 0", lambda: Pointwise(0, 2)),
    ("exceed twice the crop=2", given(SpatialCrop(2), 1, 1, 1, 4, 6)),
    ("odd number of pixels a side", errors(torch.nn.Identity(), 2, 3, 8, 8)),
    (r"module must give invariants .* got shape \(2,\)", errors(lambda x: x[:, 0, 0, 0, 0], 2, 3, 8, 9, 9)),
    (r"shape must have 4 axes .* or 5 .* got \(2, 3, 9\)", errors(torch.nn.Identity(), 2, 3, 9)),
    ("finite outputs", errors(lambda x: x * float("nan"), 2, 3, 9, 9)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
