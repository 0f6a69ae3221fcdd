"""Cross attention: queries of one feature map, keys and values of another on the same grid."""

import functools

import pytest
import torch
import torch.nn.functional as F
from group_layers import GROUPS, layer

from tg_equiattn.nn import GroupAttention, LiftingAttention
from tg_equiattn.testing import act, equivariance_error

D4 = GROUPS["D4"]


def by_content(group, kind=GroupAttention, **options):
    """Attention by content alone, over all pixels."""
    return layer(kind, group, 3, 4, kernel_size=None, encoding=None, context_channels=5, **options)


CONTENT = {
    "relative": functools.partial(by_content, relation="relative"),
    "ge_vit": functools.partial(by_content, relation="ge_vit"),
    "lifted": functools.partial(by_content, relation="lifted"),
    "frame": by_content,
    "lifting": functools.partial(by_content, kind=LiftingAttention),
}


@pytest.mark.parametrize("kind", CONTENT)
def test_no_images_and_half_precision(kind):
    """Under autocast, scores and their softmax are in float32, as by the definition that exporters get."""
    attention = CONTENT[kind](D4)
    x, context = (y.float() for y in two_images(D4, kind))
    assert attention(x[:0], context=context[:0], context_mask=torch.ones(1, 4, 6) > 0).shape[0] == 0
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x, context=context)
        attention.plain = True
        torch.testing.assert_close(out, attention(x, context=context), rtol=0, atol=0)


def two_images(group, kind):
    axes = [] if kind == "lifting" else [len(group)]
    return torch.randn(2, 3, *axes, 5, 5).double(), torch.randn(2, 5, *axes, 4, 6).double()


@pytest.mark.parametrize("kind", CONTENT)
def test_a_context_of_another_size(kind, randomise):
    """Content has no places: its tokens are the same keys on the grid of the input, beside one that is masked."""
    attention = randomise(CONTENT[kind](D4)).double()
    x, context = two_images(D4, kind)
    mask = torch.rand(2, 4, 6) < 0.7
    moved = F.pad(context.flatten(-2), (0, 1), value=torch.nan).unflatten(-1, (5, 5))
    seen = F.pad(mask.flatten(1), (0, 1)).unflatten(1, (5, 5))
    wanted = attention(x, context=moved, context_mask=seen)
    torch.testing.assert_close(attention(x, context=context, context_mask=mask), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", CONTENT)
def test_images_that_are_transformed_apart(kind, randomise):
    """By content alone the context may move by an element of its own, but for frames, which compare orientations."""
    attention = randomise(CONTENT[kind](D4)).double()
    x, context = two_images(D4, kind)
    apart = max(
        float((attention(x, context=act(context, D4, g)) - attention(x, context=context)).detach().abs().max())
        for g in range(len(D4))
    )
    assert (apart > 1e-3) == (kind == "frame")
    assert apart < 1e-10 or kind == "frame"
    assert equivariance_error(lambda x: attention(x, context=context), D4, x) <= 1e-10 or kind == "frame"
    together = [
        attention(act(x, D4, g), context=act(context, D4, g)) - act(attention(x, context=context), D4, g)
        for g in range(len(D4))
    ]
    assert max(float(error.detach().abs().max()) for error in together) < 1e-10


def test_contexts_that_do_not_fit_are_refused():
    x, context = torch.randn(2, 3, 8, 5, 5), torch.randn(2, 3, 8, 4, 6)
    attention = layer(GroupAttention, D4)
    with pytest.raises(ValueError, match=r"context must have the batch and the pixels .* or 'rotary' it may have"):
        attention(x, context=context)
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    attention = layer(GroupAttention, D4, kernel_size=None, encoding=None, relation="relative")
    for other in (context, x):
        with pytest.raises(ValueError, match="context_mask must be given with mask and context, got None"):
            attention(x, mask, context=other)
    with pytest.raises(ValueError, match="context_mask must be None without context"):
        attention(x, context_mask=mask)
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(2 or 1, 4, 6\)"):
        attention(x, context=context, context_mask=mask)
