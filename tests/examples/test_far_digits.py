"""Pairs of digits far apart, and the study of which networks compare them."""

import dataclasses

import pytest
import torch


@pytest.fixture(scope="module")
def study():
    import far_digits

    return far_digits


@pytest.fixture(scope="module")
def canvases():
    from data.far_digits import far_digits

    return far_digits(40, 30, 32, 14)


def test_digits_lie_far_apart(canvases):
    """Two of different classes, whole and nothing else, with the gap between them; none is in both parts."""
    from data.digits import sklearn_digits

    images, classes, *parts = sklearn_digits()
    for part, (pictures, masks, labels) in zip(parts, canvases, strict=True):
        mine = {
            image.numpy().tobytes(): int(label) for image, label in zip(images[part, 0], classes[part], strict=True)
        }
        assert (labels[:, 0] != labels[:, 1]).all()
        assert torch.equal(pictures, pictures * masks.sum(1, keepdim=True))
        for picture, boxes, pair in zip(pictures[:, 0], masks, labels, strict=True):
            edges = []
            for box, label in zip(boxes.bool(), pair, strict=True):
                assert mine[picture[box].numpy().tobytes()] == label
                where = box.nonzero()
                edges.append((where.amin(0), where.amax(0)))
            (low, high), (low_other, high_other) = edges
            gaps = torch.maximum(low_other - high, low - high_other) - 1
            assert gaps.max() >= 14


def test_labels_and_turns(canvases):
    from data.far_digits import from_one_digit, turned

    training, testing = canvases
    assert torch.equal(testing.labels.sum(1), torch.ones(30, dtype=torch.int64))
    assert (testing.classes.gather(1, testing.labels.argmax(1, keepdim=True))[:, 0] == testing.classes.amax(1)).all()
    there = turned(testing, 1)
    assert torch.equal(there.images[0, 0], testing.images[0, 0].rot90())
    assert torch.equal(there.masks[3, 1], testing.masks[3, 1].rot90())
    assert torch.equal(turned(there, 3).images, testing.images)
    # a nine is the greater and a zero the other, always; what the class decides can be known, and no more
    extremes = training._replace(classes=torch.tensor([[9, 0], [0, 9]]))
    assert from_one_digit(extremes, extremes) == 100
    torn = training._replace(classes=torch.tensor([[5, 0], [5, 0], [5, 9]]))
    assert from_one_digit(torn, torn) == pytest.approx(100 * 5 / 6)


@pytest.mark.parametrize(
    "name",
    ["window attention", "global attention", "global, starting near", "exact attention", "G-CNN", "G-CNN + mean"],
)
def test_who_sees_the_other_digit(study, canvases, name):
    """With windows and convolutions alone a digit's score does not depend on the other one; turns change no score."""
    torch.manual_seed(0)
    model = study.build(dataclasses.replace(study.PRESETS["quick"], models=(name,))).eval()
    batch = study.Canvases(*(x[:6] for x in canvases[1]))
    batch = batch._replace(images=batch.images.clone().requires_grad_())
    logits, _ = study.predict(model, batch)
    (gradient,) = torch.autograd.grad(logits.unflatten(0, (-1, 2))[:, 0].sum(), batch.images)
    own, other = (gradient[:, 0] * batch.masks[:, digit] for digit in (0, 1))
    assert own.abs().max() > 1e-6
    assert bool(other.any()) == (name not in ("window attention", "G-CNN"))
    with torch.no_grad():
        there, _ = study.predict(model, study.turned(batch, 1))
    assert (there - logits).abs().max() < 1e-5 * logits.abs().max()
