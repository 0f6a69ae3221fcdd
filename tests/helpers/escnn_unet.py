"""A U-Net of escnn's modules and of ours, for tests of masks and of export."""

import torch
from escnn import nn
from fields import of, regular, trivial
from tg_equiattn.integrations.escnn import MaskedSequential


def conv(source, target, *args, **options):
    """escnn's convolution with a basis of its own. escnn shares cached bases, whatever their dtype."""
    return of(source.gspace, "Conv")(source, target, *args, recompute=True, **options)


class UNet(torch.nn.Module):
    """Attention at two levels, a convolution with a stride and a pool, a sum, a concatenation and a context."""

    def __init__(self, gspace):
        super().__init__()
        self.image, fine = trivial(gspace, 1), regular(gspace, 3)
        up, context = of(gspace, "Upsampling"), regular(gspace, 6)
        pool = nn.PointwiseMaxPool2D if gspace.dimensionality == 2 else nn.PointwiseMaxPool3D
        smooth = "bilinear" if gspace.dimensionality == 2 else "trilinear"

        def attention(source, **options):
            return of(gspace, "GroupAttention")(source, fine, heads=2, kernel_size=3, **options)

        def convolution(source, **options):
            options = {"kernel_size": 3, "padding": 1, **options}
            return nn.SequentialModule(conv(source, fine, **options), nn.InnerBatchNorm(fine), nn.ReLU(fine))

        block, norm = of(gspace, "AttentionBlock"), of(gspace, "RegularLayerNorm")
        self.encoder = MaskedSequential(convolution(self.image), block(attention(fine)))
        self.down = MaskedSequential(convolution(fine, kernel_size=4, stride=2), norm(fine), attention(fine))
        self.bottom = MaskedSequential(pool(fine, 2), convolution(fine), up(fine, scale_factor=2, mode=smooth))
        self.up = MaskedSequential(up(fine, scale_factor=2, mode="nearest"), convolution(fine))
        self.join = MaskedSequential(convolution(context))
        self.skip = attention(fine, context_type=fine)
        self.readout = MaskedSequential(conv(fine, self.image, kernel_size=1))

    def forward(self, x, mask, in_convolutions=True):
        def call(part, x, mask):
            return part(x, mask if in_convolutions else None)

        encoded = call(self.encoder, x, mask)
        half = None if mask is None else self.down.mask_after(mask)
        down = call(self.down, encoded, mask)
        up = call(self.up, down + call(self.bottom, down, half), half)
        joined = call(self.join, nn.tensor_directsum([up, encoded]), mask)
        return call(self.readout, self.skip(joined, mask, context=encoded, context_mask=mask), mask)
