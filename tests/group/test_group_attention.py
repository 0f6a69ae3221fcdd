import math

import pytest
import torch
from attention_operands import EXTREMES, assert_same, gradients, group_attention, operands

from tg_equiattn.group.encodings import relation_index
from tg_equiattn.groups import cyclic

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")


def attend(tensors, index, window, **options):
    return group_attention(*tensors, index, window=window, **options)


def with_biases(tensors):
    """Content-free ones, of each head: 3 heads in one image are more lanes than a tile may have, 3 in two are fewer."""
    (heads, elements), offset_encoding = tensors[0].shape[1:4:2], tensors[3]
    shapes = (heads, *offset_encoding.shape[:2]), (heads, elements)
    return [
        *tensors,
        *(torch.randn(s, dtype=offset_encoding.dtype).to(offset_encoding.device).requires_grad_() for s in shapes),
    ]


def biased(tensors, index, window, **options):
    *tensors, space_bias, group_bias = tensors
    return attend(tensors, index, window, space_bias=space_bias, group_bias=group_bias, **options)


FEW = {"batch": 1, "heads": 1, "channels": 3, "value_channels": 2}
PATHS = [  # elements, image, window, more of operands, dropout
    *((4, spatial, size, {}, 0.0) for spatial in ((4, 5), (2, 3, 2)) for size in (3, None)),
    (2, (3, 4), 7, {}, 0.0), (2, (1, 2), 7, {}, 0.0),  # windows larger than the image
    (4, (4, 5), 3, {}, 0.4), (4, (4, 5), None, {}, 0.4),
]  # fmt: skip
TILES = (8, (34, 20), 5, FEW, 0.0)  # a tile holds 2^20 numbers, those of 655 pixels
MANY = [(8, s, k, FEW | {"heads": 2}, 0.0) for s, k in (((34, 40), 5), ((5, 6, 7), 3), ((12, 12), None))]
FORMS = [(relation, *path) for relation in ("ge_vit", "relative") for path in PATHS]
FORMS += [pytest.param(relation, *TILES, marks=pytest.mark.slow) for relation in ("ge_vit", "relative")]
FORMS += [pytest.param("relative", *path, marks=pytest.mark.slow) for path in MANY]  # several tiles of 2^17 scores


@pytest.mark.parametrize(("relation", "elements", "spatial", "size", "more", "dropout"), FORMS)
def test_every_form_agrees(relation, elements, spatial, size, more, dropout, device):
    """The operator and the definition, in one tile or several, images and volumes."""
    tensors, window = operands(elements, spatial, size, device=device, **more)
    tensors, index = with_biases(tensors), relation_index(cyclic(elements), relation).to(device)

    def attend_by(backend):
        torch.manual_seed(3)
        return biased(tensors, index, window, backend=backend, dropout=dropout)

    assert_same(attend_by("torch"), attend_by("plain"), tensors)


@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_scores(extreme, relation, device):
    index = relation_index(cyclic(2), relation)
    exact, window = extreme(torch.float64)
    single = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected = attend(exact, index, window, backend="plain")
    out = attend(single, index.to(device), window)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-3 * max(1.0, float(b.abs().max())))


def seeded_dropout(tensors, index, window):
    torch.manual_seed(5)
    return attend(tensors, index, window, dropout=0.4)


def test_dropout_gradients_use_the_same_draw():
    tensors, window = operands(2, (3, 3), batch=1, heads=2, channels=2, value_channels=1)
    index = relation_index(cyclic(2), "ge_vit")
    assert torch.autograd.gradcheck(lambda *x: seeded_dropout(x, index, window), tensors, fast_mode=True)


def test_dropout_is_unbiased_and_seeded():
    tensors, window = operands(2, (3, 4), batch=1, heads=1)
    index, count = relation_index(cyclic(2), "ge_vit"), 400
    expected = attend(tensors, index, window).detach()
    assert torch.equal(*(seeded_dropout(tensors, index, window) for _ in range(2)))
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([attend(tensors, index, window, dropout=0.4) for _ in range(count)])
    deviation = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(count))
    assert draws.std(0).min() > 0
    assert deviation.max() < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands(dtype, device):
    tensors, window = operands(3, (5, 6), dtype=torch.float32, device=device)
    index = relation_index(cyclic(3), "ge_vit").to(device)
    out = attend([x.detach().to(dtype) for x in tensors], index, window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), attend(tensors, index, window), rtol=0, atol=0.15)
