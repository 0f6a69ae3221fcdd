"""Cross attention: queries of one feature map, keys and values of another on the same grid."""

import functools

import pytest
import torch
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


def two_images(group, kind, pixels=(4, 6)):
    axes = [] if kind == "lifting" else [len(group)]
    return torch.randn(2, 3, *axes, 5, 5).double(), torch.randn(2, 5, *axes, *pixels).double()


def derivatives(out, inputs):
    """The output, and what a loss has of first and second derivatives."""
    first = torch.autograd.grad(out.cos().sum(), inputs, create_graph=True)
    return out, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


@pytest.mark.parametrize("pixels", [(4, 6), (5, 5)], ids=["another size", "the size of the input"])
@pytest.mark.parametrize("kind", CONTENT)
def test_a_context_with_its_own_mask_by_definition(kind, pixels, randomise):
    """Softmax over all valid tokens of the context that a query meets, with a mask of its own; derivatives, too."""
    attention = randomise(CONTENT[kind](D4)).double()
    x, context = (y.requires_grad_() for y in two_images(D4, kind, pixels))
    mask = torch.rand(2, *pixels) < 0.7
    q, k, v = (y if kind != "lifting" else y.unsqueeze(3) for y in attention.project(x, context))
    q, k, v = (y.flatten(4) for y in (q, k, v))  # (B, heads, C, H, pixels)
    if kind == "frame":
        scores = torch.einsum("bechi,bechj->behij", q, k) / attention.head_channels**0.5
        scores = scores.masked_fill(~mask.flatten(1)[:, None, None, None], -torch.inf)
        heads = torch.einsum("behij,bechj->bechi", scores.softmax(-1), v)
    else:
        scores = torch.einsum("becti,becsj->betisj", q, k) / attention.head_channels**0.5
        scores = scores.masked_fill(~mask.flatten(1)[:, None, None, None, None], -torch.inf)
        heads = torch.einsum("betisj,becsj->becti", scores.flatten(-2).softmax(-1).view_as(scores), v)
        if kind in ("ge_vit", "lifted"):  # summed over all query elements
            heads = heads.sum(3, keepdim=True)
        heads = heads.expand(-1, -1, -1, len(D4), -1)
    wanted = attention.out(heads.unflatten(-1, (5, 5)).flatten(1, 2))
    out = attention(x, context=context, context_mask=mask)
    for a, b in zip(*(derivatives(y, (x, context)) for y in (out, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1.0, float(b.detach().abs().max())))
    holes = context.detach().masked_fill(~mask.view(2, 1, *[1] * (context.ndim - 4), *pixels), torch.nan)
    torch.testing.assert_close(attention(x, context=holes, context_mask=mask), wanted, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_size": 3}, "kernel_size must be None with encoding=None, got 3"),
        ({"locality": 1.0}, "locality must be None or 'auto' with encoding=None, got 1.0"),
    ],
)
def test_arguments_that_depend_on_offsets_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        layer(GroupAttention, D4, **{"kernel_size": None, "encoding": None, **change})


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
