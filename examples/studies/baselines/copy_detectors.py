"""U-Nets that find copied regions by convolutions, by comparing descriptors or by group attention; and SIFT."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from skimage.feature import SIFT
from skimage.measure import ransac
from skimage.transform import SimilarityTransform, rescale
from tg_equiattn.integrations.escnn import R2AttentionBlock, R2GroupAttention
from torch import Tensor, nn

from .gcnn import _drop_filters, _without_filters, group_from_gspace, gspaces
from .gcnn import nn as escnn

GSPACE = gspaces.flipRot2dOnR2(4)
GROUP = group_from_gspace(GSPACE)


class Unit(nn.Module):
    """Convolution, batch norm and ReLU between ``C`` channels, or fields of D4; ``incoming=0`` is an image."""

    def __init__(self, grouped: bool, incoming: int, outgoing: int, kernel_size: int = 3, relu: bool = True) -> None:
        super().__init__()
        options = {"kernel_size": kernel_size, "padding": kernel_size // 2, "bias": False}
        self.fields = None
        if grouped:
            image, regular = [GSPACE.trivial_repr], [GSPACE.regular_repr]
            self.fields, fields = (escnn.FieldType(GSPACE, n * regular or image) for n in (incoming, outgoing))
            layers = escnn.R2Conv(self.fields, fields, **options), escnn.InnerBatchNorm(fields), escnn.ReLU(fields)
            self.layers = escnn.SequentialModule(*layers[: 2 + relu])
        else:
            layers = nn.Conv2d(incoming or 1, outgoing, **options), nn.BatchNorm2d(outgoing), nn.ReLU()
            self.layers = nn.Sequential(*layers[: 2 + relu])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if self.fields is None else self.layers(escnn.GeometricTensor(x, self.fields)).tensor


class Deeper(nn.Module):
    """Another level of the U-Net, at half the resolution: ``C`` channels in and out."""

    def __init__(self, grouped: bool, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.MaxPool2d(2), *(Unit(grouped, channels, channels) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.layers(x), scale_factor=2)


def queries_and_keys(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means over 2 x 2 pixels: of every second row and column, and of all, for copies lie between pixels of a grid."""
    return F.avg_pool2d(x, 2), F.avg_pool2d(x, 2, 1)


def places(x: Tensor) -> Tensor:
    """Coordinates (x right, y up) of the pixels of features with sides a quarter or half, in units of the image."""
    height, width = x.shape[2:]
    right, up = torch.arange(width) - (width - 1) / 2, (height - 1) / 2 - torch.arange(height)
    return torch.stack([right.expand(height, -1), up[:, None].expand(-1, width)]).to(x)


class Comparison(nn.Module):
    """The largest cosines of a pixel's descriptor with those of distant pixels at all elements of the group.

    ``max_g <d_i, L_g d_j>`` for the pixels j that are distant from i; of these, the 4 largest.
    """

    outgoing = 4

    def __init__(self, grouped: bool, channels: int, descriptors: int) -> None:
        super().__init__()
        self.order = len(GROUP) if grouped else 1
        self.describe = Unit(grouped, channels, descriptors, relu=False)
        self.moved = torch.as_tensor(GROUP.cayley[GROUP.inverse]) if grouped else torch.zeros(1, 1, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        query, key = queries_and_keys(self.describe(x))
        place, other = places(query).flatten(1).T * 2, places(key).flatten(1).T
        query, key = (F.normalize(d.flatten(2), dim=1).unflatten(1, (-1, self.order)) for d in (query, key))
        moved = query[:, :, self.moved].movedim(3, 1).flatten(1, 2)  # (B, h C, g, pixels)
        key = key.transpose(1, 2).flatten(1, 2)
        with torch.no_grad():  # gradients need the largest alone
            cosines = (moved.flatten(2).mT @ key).unflatten(1, (self.order, -1)).amax(1)
            distant = torch.cdist(place, other) > 5
            found = cosines.masked_fill(~distant, -1).topk(self.outgoing, 2).indices
        others = key.gather(2, found.flatten(1)[:, None].expand(-1, key.shape[1], -1)).unflatten(2, found.shape[1:])
        best = torch.einsum("bcgi,bcik->bgki", moved, others).amax(1)
        return best.repeat_interleave(self.order, 1).unflatten(2, (x.shape[2] // 2, x.shape[3] // 2))


class Attention(nn.Module):
    """A block of attention by content over all pixels and elements of D4; features have the pixels' places, too."""

    def __init__(self, grouped: bool, channels: int, descriptors: int, heads: int, head_channels: int) -> None:
        super().__init__()
        self.describe = Unit(grouped, channels, descriptors)
        fields = escnn.FieldType(GSPACE, (descriptors + 2) * [GSPACE.regular_repr])
        layer = R2GroupAttention(
            fields, fields, heads=heads, head_channels=head_channels, relation="relative", kernel_size=None,
            encoding=None, locality=None, context_type=fields,
        )  # fmt: skip
        with torch.no_grad():  # start with attention to equal descriptors at distant places
            layer.core.key.weight.copy_(2 * layer.core.query.weight)
            layer.core.key.weight[:, descriptors:] *= -1
        self.block = R2AttentionBlock(layer)
        self.frames = torch.as_tensor(GROUP.matrices).float()
        self.outgoing = descriptors + 2

    def located(self, x: Tensor, unit: float) -> escnn.GeometricTensor:
        place = places(x) * unit
        along = torch.einsum("hd,dij->hij", self.frames[:, :, 0].to(x), place)  # <h e_x, place>
        square = place.square().sum(0).expand_as(along)
        x = torch.cat([x, *(y.expand(len(x), -1, -1, -1) for y in (along, square))], 1)
        return escnn.GeometricTensor(x, self.block.in_type)

    def forward(self, x: Tensor) -> Tensor:
        query, key = queries_and_keys(self.describe(x))
        return self.block(self.located(query, 1 / 8), context=self.located(key, 1 / 16)).tensor


class UNet(nn.Module):
    """Logits of pixels, ``(B, 1, H, W)`` -> the same; ``middle`` works at a quarter of the resolution.

    Args:
        grouped: fields of D4 instead of channels.
        width: channels or fields at half the resolution; twice as many at a quarter.
        middle: ``"deeper"``, ``"comparison"`` or ``"attention"``.
        options: of the middle.
    """

    def __init__(self, grouped: bool, width: int, middle: str, **options: int) -> None:
        super().__init__()
        wide = 2 * width
        self.order = len(GROUP) if grouped else 1
        self.full = nn.Sequential(Unit(grouped, 0, width, 5), nn.MaxPool2d(2))
        self.fine = Unit(grouped, width, width)
        self.coarse = nn.Sequential(nn.MaxPool2d(2), Unit(grouped, width, wide), Unit(grouped, wide, wide))
        if middle == "deeper":
            self.middle, more = Deeper(grouped, wide), wide
        else:
            self.middle = {"comparison": Comparison, "attention": Attention}[middle](grouped, width, **options)
            more = self.middle.outgoing
        self.reads_fine = middle != "deeper"
        self.join = nn.Sequential(Unit(grouped, wide + more, wide), Unit(grouped, wide, width))
        self.last = Unit(grouped, 2 * width, width)
        self.score = nn.Conv2d(width, 1, 1)
        nn.init.constant_(self.score.bias, -3.0)  # few pixels are copied
        # escnn's convolutions keep expanded filters in eval mode, which no checkpoint needs and another mode refuses
        self._register_state_dict_hook(_without_filters)
        self.register_load_state_dict_pre_hook(_drop_filters)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(self.full(x))
        coarse = self.coarse(fine)
        joined = self.join(torch.cat([coarse, self.middle(fine if self.reads_fine else coarse)], 1))
        y = self.last(torch.cat([fine, F.interpolate(joined, scale_factor=2)], 1))
        y = self.score(y.unflatten(1, (-1, self.order)).amax(2))
        return F.interpolate(y, scale_factor=2, mode="bilinear")


class Sift(nn.Module):
    """SIFT keypoints matched within an image and with its mirror image; a pixel's score is the number of matches that
    one similarity explains, near these matches."""

    def keypoints(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sift = SIFT()
        try:
            sift.detect_and_extract(rescale(image, 2, order=3))
        except RuntimeError:  # it found none
            return np.empty((0, 2)), np.empty((0, 128))
        return sift.keypoints / 2, sift.descriptors.astype(np.float64)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for score, image in zip(out[:, 0].numpy(), x[:, 0].numpy(), strict=True):
            image = (image - image.min()) / np.ptp(image)
            here, d = self.keypoints(image)
            for mirror in (False, True):
                other, e = self.keypoints(image[:, ::-1]) if mirror else (here, d)
                place = np.abs([0, image.shape[1] - 1] * np.array(mirror) - other)  # in the image
                distances = cdist(d, e)
                distances[cdist(here, place) < 8] = np.inf
                first, second = np.sort(distances, 1)[:, :2].T if len(e) > 1 else np.full((2, len(d)), np.inf)
                (source,) = np.nonzero(first < 0.8 * second)
                target = distances.argmin(1)[source] if len(source) else source
                if len(np.unique(target)) < 3:
                    continue
                pairs = here[source], other[target]
                _, inliers = ransac(pairs, SimilarityTransform, 2, 2, max_trials=100, rng=0)
                if inliers is None or inliers.sum() < 3:
                    continue
                found = np.concatenate([here[source][inliers], place[target][inliers]])
                near = cdist(np.argwhere(np.ones(image.shape)), found).min(1).reshape(image.shape) < 5
                score[near] = np.maximum(score[near], inliers.sum())
        return out
