"""Softmax attention of scalars: torch's own, whose second derivatives are the plain formula's."""

import pytest
import torch
from clouds import close
from torch.utils.checkpoint import checkpoint

from tg_equiattn.functional.softmax_attention import softmax_attention

B, N, C = 3, 11, 2
LENGTHS = {"equal": None, "ragged": torch.tensor([11, 4, 0])}
MASKS = {name: None if n is None else torch.arange(N) < n[:, None] for name, n in LENGTHS.items()}


def inputs():
    return tuple(torch.randn(B, N, C, dtype=torch.float64).requires_grad_() for _ in range(3))


def with_gradients(out, qkv, **options):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), qkv, **options)


def plain(*arguments):
    """As transforms see it, by the formula."""
    with torch.autograd.forward_ad.dual_level():
        return softmax_attention(*arguments)


@pytest.mark.parametrize("attention", [softmax_attention, plain])
@pytest.mark.parametrize("kind", LENGTHS)
def test_equals_the_definition(kind, attention):
    qkv, lengths, mask = inputs(), LENGTHS[kind], MASKS[kind]
    out = attention(*qkv, mask)
    for b in range(B):
        n = N if lengths is None else int(lengths[b])
        for i in range(n):
            scores = torch.stack([(qkv[0][b, i] * qkv[1][b, j]).sum() for j in range(n)]) / C**0.5
            wanted = sum(p * qkv[2][b, j] for j, p in enumerate(scores.softmax(0)))
            close([out[b, i]], [wanted])
    there = 1.0 if lengths is None else (torch.arange(N) < lengths[:, None])[..., None]
    close(with_gradients(out * there, qkv), with_gradients(plain(*qkv, mask) * there, qkv))


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant):
    qkv = inputs()
    out = checkpoint(softmax_attention, *qkv, None, use_reentrant=reentrant)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    close([x.grad for x in qkv], with_gradients(softmax_attention(*qkv, None), qkv)[1:])


def test_backward_twice():
    qkv = inputs()
    out = softmax_attention(*qkv, None)
    close(with_gradients(out, qkv, retain_graph=True), with_gradients(out, qkv))
    with pytest.raises(RuntimeError, match="second time"):
        with_gradients(out, qkv)
