"""The published GSA-Nets and GE-ViT networks in plain torch, in eval mode, sharing no code with the library.

Positions are (row, column). Head e's channel c of a projection is its channel c * heads + e. Scores are divided by the
square root of the layer's input channels; the "layer norm" is one mean and variance an image; space is summed up.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-12


def elements(rotations, mirror=False):
    """Matrices on (row, column): counter-clockwise rotations, then each of them after column -> -column."""
    angles = [2 * math.pi * i / rotations for i in range(rotations)]
    turns = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    turns = torch.tensor(turns, dtype=torch.float64)
    flip = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    return torch.cat([turns, turns @ flip]) if mirror else turns


def arguments(matrices):
    """u = h^-1 t s^-1 t of every (h, t, s) (GE-ViT Eq. 17), by multiplying matrices."""
    h, t, s = matrices[:, None, None], matrices[None, :, None], matrices[None, None]
    product = h.mT @ t @ s.mT @ t
    distance = (product[..., None, :, :] - matrices).abs().amax((-1, -2))
    assert distance.amin(-1).max() < 1e-9
    return distance.argmin(-1)


def norm(channels):
    return nn.GroupNorm(1, channels, eps=EPS)


def pointwise(in_channels, out_channels, bias=True):
    return nn.Conv3d(in_channels, out_channels, 1, bias=bias)


def coordinate_mlp(width):
    return nn.Sequential(nn.Linear(1, 16), nn.LayerNorm(16, eps=EPS), nn.SiLU(), nn.Linear(16, width))


class PublishedAttention(nn.Module):
    """Lifting (Eq. 14) from (B, C, 1, H, W), or group self-attention (Eq. 16) from (B, C, |H|, H, W)."""

    def __init__(self, matrices, in_channels, out_channels, heads, window, lifts=False):
        super().__init__()
        width = out_channels // 2
        self.part = width // 2 if lifts else width // 3
        self.scale, self.width, self.heads, self.window = in_channels**-0.5, width, heads, window
        self.query, self.key, self.value = (pointwise(in_channels, width * heads) for _ in range(3))
        self.out = pointwise(width * heads, out_channels)
        self.row, self.column = coordinate_mlp(self.part), coordinate_mlp(self.part)
        self.table = None if lifts else nn.Embedding(len(matrices), width - 2 * self.part)
        self.u = None if lifts else arguments(matrices)
        coordinate = torch.linspace(-1, 1, window, dtype=torch.float64)
        offsets = torch.cartesian_prod(coordinate, coordinate)  # (row, column) of each place in the window
        self.offsets = torch.einsum("hba,db->hda", matrices, offsets)  # seen from h: h^-1 is the transpose

    def windows(self, x):
        """(B, n, H, W) -> (B, n, window^2, H, W), zero outside of the image."""
        patches = F.unfold(x, self.window, padding=self.window // 2)
        return patches.unflatten(1, (x.shape[1], -1)).unflatten(-1, x.shape[2:])

    def forward(self, x):
        query = self.query(x).unflatten(1, (self.width, self.heads))
        key, value = (
            self.windows(p(x).flatten(1, 2)).unflatten(1, (self.width, self.heads, -1)) for p in (self.key, self.value)
        )
        row, column = self.row(self.offsets[..., :1]), self.column(self.offsets[..., 1:])
        place, rest = query[:, : 2 * self.part], query[:, 2 * self.part :]
        content = torch.einsum("bcntyx,bcnsdyx->bntsdyx", query, key)
        space = torch.einsum("bcntyx,hdc->bnhtdyx", place, torch.cat([row, column], -1))
        score = content[:, :, None] + space[:, :, :, :, None]
        if self.table is not None:
            score = score + torch.einsum("bcntyx,htsc->bnhtsyx", rest, self.table(self.u))[:, :, :, :, :, None]
        outside = self.windows(torch.ones_like(x[:1, :1, 0]))[0, 0] == 0
        score = (self.scale * score).masked_fill(outside, -math.inf)
        weight = score.flatten(4, 5).softmax(4).view(score.shape)
        return self.out(torch.einsum("bnhtsdyx,bcnsdyx->bcnhyx", weight, value).flatten(1, 2))


class PublishedBlock(nn.Module):
    def __init__(self, matrices, in_channels, out_channels, heads, window, crop):
        super().__init__()
        half, self.crop = out_channels // 2, crop
        self.norms = nn.ModuleList(norm(n) for n in (in_channels, out_channels, half, out_channels))
        self.attention = PublishedAttention(matrices, in_channels, out_channels, heads, window)
        self.shortcut = nn.Identity() if in_channels == out_channels else pointwise(in_channels, out_channels)
        self.down, self.up = pointwise(out_channels, half), pointwise(half, out_channels)

    def forward(self, x):
        y = F.silu(self.norms[1](self.attention(F.silu(self.norms[0](x))))) + self.shortcut(x)
        y = y[..., self.crop : y.shape[-2] - self.crop, self.crop : y.shape[-1] - self.crop]
        return y + self.norms[3](self.up(F.silu(self.norms[2](self.down(y)))))


class PublishedNetwork(nn.Module):
    """Lifting, then groups of so many blocks, pools between them, and after the last where ``pool_last``; ``crops`` is
    one a block. With ``norm_between`` every block is followed by norm and swish."""

    def __init__(
        self, matrices, in_channels, classes, *, heads, window, lifting, groups, widths, crops, norm_between, pool_last
    ):
        super().__init__()
        self.lifting = PublishedAttention(matrices, in_channels, lifting, heads, window, lifts=True)
        self.first = norm(lifting)
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        self.groups, self.pool_last, before, crops = groups, pool_last, lifting, iter(crops)
        for count, width in zip(groups, widths, strict=True):
            for _ in range(count):
                self.blocks.append(PublishedBlock(matrices, before, width, heads, window, next(crops)))
                self.between.append(nn.Sequential(norm(width), nn.SiLU()) if norm_between else nn.Identity())
                before = width
        self.classifier = pointwise(before, classes, bias=False)

    def forward(self, image):
        x = F.silu(self.first(self.lifting(image[:, :, None])))
        layers = iter(zip(self.blocks, self.between, strict=True))
        for number, count in enumerate(self.groups, start=1):
            for _ in range(count):
                block, after = next(layers)
                x = after(block(x))
            if number < len(self.groups) or self.pool_last:
                x = F.max_pool3d(x, (1, 2, 2))
        return self.classifier(x).sum((-2, -1)).amax(-1)


def copy_norm(ours, theirs):
    theirs.weight, theirs.bias = ours.weight, ours.bias


def copy_pointwise(ours, theirs, rows=slice(None), columns=slice(None), factor=1.0):
    theirs.weight = nn.Parameter(factor * ours.weight.detach()[rows][:, columns][..., None, None])
    if theirs.bias is not None:
        theirs.bias = nn.Parameter(factor * ours.bias.detach()[rows])


def copy_attention(ours, theirs):
    """Our heads lie one after the other, their positions are (x, y) with y up, and the scale is of the head width."""
    width, heads, part = theirs.width, theirs.heads, theirs.part
    channels = torch.arange(width)
    ordered = torch.cat([channels[part : 2 * part], channels[:part], channels[2 * part :]])  # (row, column, rest)

    def interleaved(channels):
        return (torch.arange(heads) * width + channels[:, None]).flatten()

    factor = ours.head_channels**-0.5 / theirs.scale
    copy_pointwise(ours.query, theirs.query, interleaved(ordered), factor=factor)
    copy_pointwise(ours.key, theirs.key, interleaved(ordered))
    copy_pointwise(ours.value, theirs.value, interleaved(channels))
    copy_pointwise(ours.out, theirs.out, columns=interleaved(channels))
    for a, b, sign in ((ours.encoding.axes[0], theirs.column, 1), (ours.encoding.axes[1], theirs.row, -1)):
        b.load_state_dict(a.state_dict())
        b[0].weight = nn.Parameter(sign * b[0].weight.detach())  # row = -y
    if theirs.table is not None:
        theirs.table.weight = ours.encoding.table


def copy_block(ours, theirs):
    for a, b in zip((ours.attention[0], ours.attention[3], ours.mlp[1], ours.mlp[4]), theirs.norms, strict=True):
        copy_norm(a, b)
    copy_attention(ours.attention[2], theirs.attention)
    copy_pointwise(ours.mlp[0], theirs.down)
    copy_pointwise(ours.mlp[3], theirs.up)
    if not isinstance(theirs.shortcut, nn.Identity):
        copy_pointwise(ours.shortcut, theirs.shortcut)


def copy_network(ours, theirs, pixels):
    """All weights of our GEViT; its mean over the ``pixels`` left goes into the classifier, whose bias stays behind."""
    copy_attention(ours.lifting[1], theirs.lifting)
    copy_norm(ours.lifting[2], theirs.first)
    blocks = [m for m in ours.blocks if hasattr(m, "shortcut")]
    for a, b in zip(blocks, theirs.blocks, strict=True):
        copy_block(a, b)
    norms = [m for m in ours.blocks if hasattr(m, "weight")]
    for a, b in zip(norms, [b[0] for b in theirs.between if isinstance(b, nn.Sequential)], strict=True):
        copy_norm(a, b)
    copy_pointwise(ours.classifier, theirs.classifier, factor=1 / pixels)
