"""Operands of group attention, random and extreme, and what is compared, for tests of all its paths."""

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tg_equiattn.grids import Window
from tg_equiattn.group import heads
from tg_equiattn.group.encodings import relation_index
from tg_equiattn.group.heads import Terms, attention_of_heads
from tg_equiattn.groups import cyclic


def operands(
    elements, spatial, kernel_size=3, *, batch=2, heads=3, channels=5, value_channels=7, dtype=torch.float64,
    device="cpu",
):  # fmt: skip
    window = Window(len(spatial), kernel_size)
    shapes = [
        *[(batch, heads, channels, elements, *spatial)] * 2,
        (batch, heads, value_channels, elements, *spatial),
        (elements, len(window.offsets(spatial)), channels),
        (elements, channels),
    ]
    tensors = [torch.randn(s, dtype=dtype).to(device).requires_grad_() for s in shapes]
    return tensors, window


RELATIONS = ["frame", "lifting", "relative", "ge_vit"]


def table_operands(relation, window, spatial, elements=3, heads=2, channels=3, value_channels=5):
    """Queries, keys, values and both tables in double precision, and the index of a relation of cyclic groups."""
    outputs, elements, index = elements, 1 if relation == "lifting" else elements, None
    if relation not in ("frame", "lifting"):
        index = relation_index(cyclic(outputs), relation)
    shapes = [(2, heads, c, elements, *spatial) for c in (channels, channels, value_channels)]
    shapes += [(heads, outputs, window.count(), channels + 1)]
    shapes += [(heads, 0 if index is None else outputs, channels + 1)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes], index


def group_attention(
    query, key, value, offset_encoding, element_encoding=None, index=None, *, window, space_bias=None, group_bias=None,
    key_mask=None, dropout=0.0, backend="torch",
):  # fmt: skip
    """Attention of heads with scores divided by the root of the number of channels; with ``backend="plain"`` by its
    definition in torch's operations, as under a transform."""
    terms = Terms(offset_encoding, element_encoding, space_bias, group_bias, index)
    query = query.to(torch.promote_types(query.dtype, torch.float32)) * query.shape[2] ** -0.5
    patched = mock.patch.object(heads, "by_operator", return_value=False)
    with patched if backend == "plain" else contextlib.nullcontext():
        return attention_of_heads(query, key, value, terms, window, key_mask, dropout)[0]


def gradients(out, tensors):
    probe = torch.cos(torch.arange(out.numel(), dtype=out.dtype, device=out.device)).view_as(out)
    return torch.autograd.grad((out * probe).sum(), tensors)


def assert_same(actual, expected, tensors, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    for a, b in zip(gradients(actual, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol * max(1.0, float(b.abs().max())))


LARGE = 200 * 3**0.5  # of three channels: scores of +-200


def opposed(dtype, size=LARGE):
    """Scores of +-200 whose content maxima and spatial maxima sit at different neighbors."""
    tensors, window = operands(2, (3, 5), channels=3, dtype=dtype)
    query, key, value, offset_encoding, element_encoding = (x.detach() for x in tensors)
    query = torch.ones_like(query)
    key = torch.zeros_like(key)
    key[:, :, 0, :, :, ::2] = size  # content prefers even columns ...
    key[:, :, 0, :, :, 1::2] = -size
    offset_encoding = 0.1 * torch.randn_like(offset_encoding)
    offset_encoding[:, 1::3, 1] -= size  # ... offsets dislike their own column by as much
    offset_encoding[:, 0::3, 1] += size
    element_encoding = 0.1 * element_encoding + torch.tensor([[0.0, 0.0, size], [0.0, 0.0, -size]], dtype=dtype)
    return [x.clone().requires_grad_() for x in (query, key, value, offset_encoding, element_encoding)], window


def at_the_border(dtype, size=LARGE):
    """Scores of +-200 whose spatial maximum lies outside the image for the queries of two sides."""
    (query, key, value, offset_encoding, element_encoding), window = opposed(dtype, size)
    with torch.no_grad():
        key[:, :, 0] = -size
        key[:, :, 0, 0, 1, 2] = size
        offset_encoding[:, :, 1] = -size
        offset_encoding[:, 0, 1] = size
    return [query, key, value, offset_encoding, element_encoding], window


class Largest(TorchDispatchMode):
    """Remember the most numbers that any tensor of floats had."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count = max([self.count, *(x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out)
                                        if isinstance(x, torch.Tensor) and x.is_floating_point())])  # fmt: skip
        return out


EXTREMES = [opposed, at_the_border]
