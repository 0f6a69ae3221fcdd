"""The operator of group attention and its definition: chunks, memory, derivatives."""

import pytest
import torch
from attention_operands import Largest, table_operands

from tg_equiattn.functional import frame_attention, group_attention
from tg_equiattn.functional.group.operator import windowed_attention, windowed_attention_backward
from tg_equiattn.grids import Window


def derivatives(out, lse, tensors, mask):
    """Outputs where queries are valid, and what a loss has of first and second derivatives."""
    out, lse = (torch.where(mask[:, None, None, None], x, 0.0) for x in (out, lse))
    options = {"allow_unused": True, "materialize_grads": True}  # tables without rows
    first = torch.autograd.grad(out.cos().sum() + lse.cos().sum(), tensors, create_graph=True, **options)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), tensors, **options)
    return [out, lse, *first, *second]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        size = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1.0, size))


@pytest.mark.parametrize("relation", ["frame", "relative", "ge_vit"])
def test_no_tensor_holds_all_scores(relation):
    """Nor |H|^2 D N of them, which are factors of the sums over t."""
    window = Window(2, 5)
    tensors, index = table_operands(relation, window, (24, 24), 8, 3, 3, 2)
    tensors = [x.detach().float() for x in tensors]
    settings = index, None, torch.tensor(0), 5, (), False, 0.0
    with Largest() as largest:
        out, lse = windowed_attention._init_fn(*tensors, *settings)
        windowed_attention_backward._init_fn(out, lse, out, lse, *tensors, *settings)
    power = {"frame": 1, "relative": 2}.get(relation, 3)
    scores = 2 * 3 * 8**power * window.count() * 24 * 24
    assert largest.count < scores / (1 if power == 1 else 8)


@pytest.mark.parametrize("relation", ["frame", "relative", "ge_vit"])
def test_keys_of_another_image(relation):
    """All pixels of an image of another size are keys, with a mask of their own: as written out; second derivatives."""
    (query, *_), index = table_operands(relation, Window(2, 3), (2, 3))
    (_, key, value, *_), _ = table_operands(relation, Window(2, 3), (4, 1))
    mask = torch.tensor([[[True], [True], [False], [True]], [[False], [True], [True], [True]]])
    operands = query, key, value

    def written(query, key, value):
        q, k, v = (x.flatten(4) for x in (query, key, value))
        keys = "h" if relation == "frame" else "s"
        scores = torch.einsum(f"bechi,bec{keys}j->behi{'s' if keys == 's' else ''}j", q, k) / 3**0.5
        weight = scores.masked_fill(~mask.flatten(1)[(slice(None),) + (None,) * (scores.ndim - 2)], -torch.inf)
        weight = weight.flatten(4).softmax(-1).view(scores.shape) if keys == "s" else weight.softmax(-1)
        out = torch.einsum(f"behi{'s' if keys == 's' else ''}j,bec{keys}j->bechi", weight, v)
        out = out.sum(3, keepdim=True).expand_as(out) if relation == "ge_vit" else out
        return out.unflatten(-1, (2, 3))

    def attend(query, key, value):
        options = {"window": Window(2, None), "key_mask": mask}
        if relation == "frame":
            return frame_attention(query, key, value, None, **options)
        return group_attention(query, key, value, None, None, index, **options)

    lse = torch.zeros(2, 1, 1, 1, 2, 3, dtype=torch.float64)
    valid = torch.ones(2, 2, 3, dtype=torch.bool)
    expected, found = (derivatives(f(*operands), lse, operands, valid) for f in (written, attend))
    assert_equal(found, expected)


def test_keys_of_another_image_are_refused_where_offsets_matter():
    (query, *_), _ = table_operands("frame", Window(2, 3), (2, 3))
    (_, key, value, *_), _ = table_operands("frame", Window(2, 3), (4, 1))
    rho, window = torch.zeros(3, 15, 3, dtype=torch.float64), Window(2, None)
    with pytest.raises(ValueError, match="key must have the shape of query"):
        frame_attention(query, key, value, rho, window=window)
    with pytest.raises(ValueError, match="offset_encoding must be given for a window"):
        frame_attention(query, query, query, None, window=Window(2, 3))
    mask, rho = torch.ones(1, 2, 2, dtype=torch.bool), torch.zeros(3, 9, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"key_mask must be bool of shape \(2 or 1, 2, 3\)"):
        frame_attention(query, query, query, rho, window=Window(2, 3), key_mask=mask)
