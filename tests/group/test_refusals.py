"""What layers, blocks and models of images refuse: each error names the argument."""

import pytest
import torch
from group_layers import attention, block, image, lifting

from tg_equiattn.group.encodings import relation_index
from tg_equiattn.group.layers import SpatialCrop
from tg_equiattn.groups import cyclic, dyadic
from tg_equiattn.nn import (
    GEViT,
    GlobalGroupAttention,
    GroupAttention,
    GroupLinear,
    GroupTransformer,
    RegularGlobalNorm,
    ScaleGroupAttention,
)
from tg_equiattn.testing import off_lattice_errors

C4, SCALES, X = cyclic(4), dyadic(3, cyclic(4)), torch.zeros(2, 3, 4, 4, 5)
FINITE = "group must be a finite group, made by cyclic"


def made(**change):
    return lambda: attention(C4, **change)


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


ROTARY = {"kernel_size": None, "encoding": "rotary"}
CONTENT = {"kernel_size": None, "encoding": None}
REFUSED = [
    ("encoding must not be 'rotary' with kernel_size=5: .*use encoding='axial', or, in lifting and group attention,",
     made(kernel_size=5, encoding="rotary")),
    ("windows, also circular ones, need the offset of each key",
     made(kernel_size=5, encoding="rotary", padding_mode="circular")),
    ("padding_mode", made(**ROTARY, padding_mode="circular")),
    ("with relation='ge_vit', which sums over query elements", made(**ROTARY, relation="ge_vit")),
    ("locality must be None or 'auto' with encoding='rotary', got 4.0", made(**ROTARY, locality=4.0)),
    ("head_channels must be at least 2 for rotary positions, .* got 1; increase it", made(**ROTARY, head_channels=1)),
    ("content_heads=1 needs locality", made(**ROTARY, content_heads=1)),
    ("kernel_size must be None with encoding=None, got 3", made(encoding=None)),
    ("locality must be None or 'auto' with encoding=None, got 1.0", made(**CONTENT, locality=1.0)),
    ("content_heads must be an integer from 0 to heads=2, got 3", made(content_heads=3)),
    ("content_heads=1 needs locality: heads without content", made(content_heads=1, locality=None)),
    ("content_heads must be at least 1 with a context, got 0", made(context_channels=5, content_heads=0)),
    ("context must be None with content_heads=0, got torch.float32 of shape", lambda: attention(
        C4, content_heads=0)(X, context=X)),
    ("padding_mode must be 'mask' where kernel_size is None", made(padding_mode="circular", kernel_size=None)),
    (r"kernel_size must be at most \(5, 11\) with padding_mode='circular' .* got 7", circular(C4, 7, 2, 5)),
    (r"kernel_size must be a positive odd integer, a tuple of 2 .* got \(3, 5, 5\)", made(kernel_size=(3, 5, 5))),
    (r"kernel_size must be .* got \(3, 4\)", made(kernel_size=(3, 4))),
    (r"kernel_size must have equal sides along axes that elements of C4.* exchange, got \(3, 5\); use one side",
     made(kernel_size=(3, 5))),
    (r"input must have shape \(B, 3, 4, H, W\), got \(2, 3, 3, 5, 5\)", given(attention(C4), 2, 3, 3, 5, 5)),
    (r"pixel must be in an image of \(4, 5\) pixels, .* got \(4, 0\)", pixel(4, 0)),
    ("scale_window must be an odd integer from 1 to 5.*got 2", scaled(scale_window=2)),
    (r"group must be a finite group, .* \(for scales of dyadic: ScaleLiftingAttention, ScaleGroupAttention\), got",
     lambda: GroupAttention(SCALES, 3, 6)),
    ("group must be scales, made by dyadic, got C4", lambda: ScaleGroupAttention(C4, 3, 6)),
    (FINITE, lambda: GlobalGroupAttention(SCALES, 3, 6)),
    (FINITE, lambda: relation_index(SCALES)),
    ("norm must be 'batch' or 'layer' for groups of scales", scaled(block, norm="global")),
    ("crop must be .* for groups of scales.*twice as large", scaled(block, crop=1)),
    ("pools must be .* for groups of scales.*twice as large", model(SCALES, pools=(1,))),
    (r"kernel_size must be at most \(1, 3\) .*\(3, 6\), .* once at the largest scale, 4, got 3",
     circular(SCALES, 3, 3, 6)),
    ("pools must be block numbers from 0 to 2", model(pools=(3,))),
    (r"crops must be one number or 2 \(one for each block\), got \(1,\)",
     lambda: GEViT(C4, 1, 5, channels=(6, 8), crops=(1,))),
    ("attn_kwargs must not have context_channels", model(attn_kwargs={"context_channels": 3})),
    ("multiples of the pool's kernel_size=2", given(model(pools=(0,))(), 2, 1, 9, 9)),
    *((message, lambda context=context: attention(C4, context_channels=5)(X, context=context))
      for message, context in (
          (r"context must have shape \(B, 5, 4, H, W\), got \(2, 3, 4, 4, 5\)", X),
          (r"context must have the batch and the pixels of the input, \(2, 3, 4, 4, 5\)", torch.ones(2, 5, 4, 5, 4)),
          ("context must be torch.float32 as the parameters are", torch.ones(2, 5, 4, 4, 5).double()),
          ("context must be given, with context_channels=5, got None", None),
          ("context must be a torch.Tensor of shape .* got str", "x"))),
    (r"input must have shape \(B, 3, 4, ...\), got \(2, 3, 5, 6\)", given(GroupLinear(C4, 3, 5), 2, 3, 5, 6)),
    (r"input must have shape \(B, 3, ...\), got \(2, 4, 4\)", given(RegularGlobalNorm(3), 2, 4, 4)),
    ("exceed twice the crop=2", given(SpatialCrop(2), 1, 1, 1, 4, 6)),
    ("odd number of pixels a side", errors(torch.nn.Identity(), 2, 3, 8, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
