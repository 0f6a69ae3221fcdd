"""Transformers of frames over tokens with positions: blocks in the Fourier basis of the group, and models of images."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..grids import centred_positions, transform_grid
from ..groups import FiniteGroup, Group
from ..modules import NotScriptable
from ..shapes import Bool, Float, Int
from ..softmax_attention import softmax_attention_of_heads
from ..torch_state import Tables, full_precision
from .encodings import RotaryEncoding, relation_index, rotated_elements
from .fourier import fourier_basis, gelu, normalised
from .layers import GroupLinear, Masked
from .windows import Checked, Mask, enter, zero_where_masked


@checks.arguments
class FrameTransformerBlock(NotScriptable, Masked, nn.Module):
    r"""Pre-norm transformer block of regular features: attention over all tokens in frames, then an MLP of channels and
    group elements.

    .. math::
        y &= x + W_o\, \mathrm{attention}(W_{qkv}\, \mathrm{norm}(x)) \\
        z &= y + W_2\, \mathrm{gelu}(W_1\, \mathrm{norm}(y))

    The maps W are those of :class:`GroupLinear`. In the attention, element h of a token attends to element h of all
    tokens, with rotary positions :math:`h^{-1} x`, as in :class:`GroupAttention` with all pixels. The norm divides by
    the root mean square over channels and group elements together and multiplies each channel by a gain. The block is
    equivariant to the group and to translations of the positions.

    The residual stream stays in the basis of the real irreps of H, where the maps are block diagonal. Queries, keys,
    values and the hidden layer are transformed to group elements and back. With many channels, a block takes less time
    than a plain transformer block of width :math:`|H| C`: about 0.4 times as much for D4 and width 768.

    Args:
        group: The finite group H. Its dimension (2 or 3) is that of positions.
        channels: Channels C of the features, for each group element.
        heads: Number of attention heads, a divisor of ``channels`` that leaves at least 2 for each head. ``None`` means
            heads of about 48 channels.
        mlp_ratio: Channels of the hidden layer of the MLP, divided by ``channels``.
        dropout: Probability, in training, of dropping a channel of a token in the output of the attention and of the
            MLP. All group elements are dropped together, which keeps the symmetry.
        drop_path: Probability, in training, of leaving out the attention or the MLP of a sample (stochastic depth).

    Shapes:
        ``(B, channels, |H|, *spatial)``, or ``(B, channels, |H|, N)`` with ``positions`` ``(N, d)`` or ``(B, N, d)`` ->
        the same.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: pre-norm blocks as in ViT; frames: Platonic Transformers (2025, arXiv:2510.03511), whose maps are one dense
    matrix; D4 in its Fourier basis: octic ViTs (2025, arXiv:2505.15441). The Fourier form for any finite group is ours.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import icosahedral
        >>> block = FrameTransformerBlock(icosahedral(), 8, heads=2)
        >>> points, features = torch.randn(2, 11, 3), torch.randn(2, 8, 60, 11)
        >>> block(features, positions=points).shape
        torch.Size([2, 8, 60, 11])
    """

    def __init__(
        self, group: Group, channels: checks.Count, *, heads: checks.Count | None = None,
        mlp_ratio: checks.Positive = 4.0, dropout: checks.Probability = 0.0, drop_path: checks.Probability = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        heads = _heads(channels) if heads is None else heads
        if channels % heads or channels < 2 * heads:
            raise ValueError(
                f"heads must divide channels={channels} into heads of at least 2 channels, which rotary positions "
                f"rotate in pairs, got {heads}"
            )
        self.group, self.channels, self.heads, self.dropout, self.drop_path = group, channels, heads, dropout, drop_path
        hidden = max(1, round(mlp_ratio * channels))
        self.gains = nn.Parameter(torch.ones(2, channels))
        self.qkv, self.out = GroupLinear(group, channels, 3 * channels), GroupLinear(group, channels, channels)
        self.up, self.down = GroupLinear(group, channels, hidden), GroupLinear(group, hidden, channels)
        self.encoding = RotaryEncoding(heads, group.dim, channels // heads)
        self.matrices = Tables(functools.partial(getattr, group, "matrices"))

    def forward(self, x: Tensor, mask: Mask = None, *, positions: Tensor | None = None) -> Tensor:
        """Apply the block.

        Args:
            x: Features of pixels, ``(B, channels, |H|, *spatial)``, or of points, ``(B, channels, |H|, N)``.
            mask: Bool ``(B or 1, *spatial)`` or ``(B or 1, N)``, true at valid pixels or points. Others change no
                result, and their outputs are zero. ``None`` means that all are valid.
            positions: Positions of points, ``(N, d)`` or ``(B, N, d)``. Their unit is that of the learned frequencies,
                which start at about one radian per unit. ``None`` means the positions of pixels, in pixels from the
                middle of the image.
        """
        checks.features(x, self.channels, self.group.dim if positions is None else 1, len(self.group), self.gains)
        x, checked = enter(x, mask)
        basis = self.out.fourier(x.device, x.dtype)[0]
        places = _places(x, positions, self.group.dim)
        key_mask = None if checked is None else checked.pixels.flatten(1)
        if key_mask is not None:
            places = torch.where(key_mask[..., None], places, 0.0)
        with full_precision(x.device):
            rows = (basis.T @ x.flatten(3).permute(0, 3, 2, 1)).flatten(2)  # (B, tokens, |H| channels)
        rows = self.transform(rows, places, key_mask)
        with full_precision(x.device):
            out = (basis @ rows.unflatten(2, (len(basis), -1))).permute(0, 3, 2, 1).reshape(x.shape)
        return zero_where_masked(out, None if isinstance(mask, Checked) else checked)

    def transform(
        self, x: Float[Tensor, "B tokens H*C"], positions: Float[Tensor, "#B tokens d"],
        mask: Bool[Tensor, "#B tokens"] | None,
    ) -> Float[Tensor, "B tokens H*C"]:  # fmt: skip
        """Apply the block to Fourier coefficients, which come before channels. Numbers at masked tokens are finite."""
        batch, tokens, _ = x.shape
        angles = self.encoding(positions, self.matrices(x.device, torch.promote_types(x.dtype, torch.float32)))
        basis = self.out.fourier(x.device, x.dtype)[0]

        def attention(y: Tensor) -> Tensor:
            y = self.qkv.to_coordinates(y, self.gains[0])
            y = y.unflatten(2, (3 * self.heads, -1)).unflatten(1, (batch, tokens))
            qkv = rotated_elements(y, basis, angles.movedim(-3, 0), 2 * self.heads).flatten(0, 1).transpose(1, 2)
            q, k, v = qkv.chunk(3, 1)
            keys = None if mask is None else mask.expand(len(self.group), batch, -1).flatten(0, 1)
            attended = softmax_attention_of_heads(q, k, v, keys, scale=v.shape[-1] ** -0.5).transpose(1, 2)
            return self.out.to_rows((basis.T @ attended.reshape(len(basis), -1)).view(len(basis), batch * tokens, -1))

        def mlp(y: Tensor) -> Tensor:
            return self.down.to_rows(gelu(self.up.to_coordinates(y, self.gains[1]), basis))

        rows = x.flatten(0, 1)
        for branch in (attention, mlp):
            rows = rows + self._dropped(branch(normalised(rows)), batch)
        return rows.view(x.shape)

    def _dropped(self, x: Float[Tensor, "rows H*C"], batch: int) -> Tensor:
        if not self.training:
            return x
        if self.dropout:
            kept = F.dropout(x.new_ones(x.shape[0], 1, self.channels), self.dropout)
            x = (x.unflatten(1, (-1, self.channels)) * kept).flatten(1)
        if self.drop_path:
            kept = F.dropout(x.new_ones(batch, 1, 1), self.drop_path)
            x = (x.unflatten(0, (batch, -1)) * kept).flatten(0, 1)
        return x

    def extra_repr(self) -> str:
        return (
            f"{self.group!r}, {self.channels}, heads={self.heads}, dropout={self.dropout}, drop_path={self.drop_path}"
        )


@checks.arguments
class FrameTransformer(NotScriptable, Masked, nn.Module):
    r"""Vision transformer of frames: filters of patches in every frame, blocks, and pooling to invariants or regular
    features out.

    The blocks are :class:`FrameTransformerBlock` modules.

    The model is equivariant to the group, and to translations by whole patches, up to what leaves the image. Positions
    of patches are in patches from the middle of the image. Images may have any size that the patch divides. Rotary
    positions extrapolate to sizes not seen in training without a parameter, but accuracy there is not guaranteed.

    Args:
        group: The finite group H. With ``patch_size`` above 1, all its elements must map the pixel grid to itself.
        in_channels: Channels of the images or volumes, for each group element if ``lifts`` is false.
        out_channels: Invariant outputs (logits), or channels of the regular features out with ``pool=False``.
        patch_size: Side of a patch in pixels.
        channels: Channels C of the tokens, for each group element.
        num_layers: Number of blocks.
        heads: Attention heads of every block, a divisor of ``channels`` that leaves at least 2 for each head. ``None``
            means heads of about 48 channels.
        mlp_ratio: Channels of the hidden layer of each MLP, divided by ``channels``.
        lifts: True for images without group elements. False for regular features, such as those of group convolutions.
        pool: True for the mean over patches and then the maximum over group elements, which is invariant, and a linear
            map to ``out_channels``. False for regular features at every patch.
        dropout: Dropout of :class:`FrameTransformerBlock`.
        drop_path: Stochastic depth of the last block. It grows linearly from 0 in the first.

    Shapes:
        ``(B, in_channels, [|H|,] *spatial)`` -> ``(B, out_channels)``, or ``(B, out_channels, |H|, *spatial /
        patch_size)`` with ``pool=False``.

    Raises:
        ValueError: if an argument is not allowed, does not fit another one, or if the patch does not divide the sides.

    Source: ViT, with the blocks of :class:`FrameTransformerBlock`.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dihedral
        >>> model = FrameTransformer(dihedral(4), 3, 10, patch_size=4, channels=8, num_layers=2)
        >>> model(torch.randn(2, 3, 16, 12)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, group: Group, in_channels: checks.Count, out_channels: checks.Count, *, patch_size: checks.Count = 16,
        channels: checks.Count, num_layers: checks.Count, heads: checks.Count | None = None,
        mlp_ratio: checks.Positive = 4.0, lifts: bool = True, pool: bool = True, dropout: checks.Probability = 0.0,
        drop_path: checks.Probability = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if patch_size > 1 and not bool(group.lattice.all()):
            raise ValueError(
                f"patch_size must be 1 for {group!r}, got {patch_size}: some elements do not map a patch of pixels to "
                "itself, so its filters cannot be rotated exactly; use patch_size=1 after convolutions with a stride, "
                "on their regular features (lifts=False here, and no argument in escnn), or a group of rotations by 90 "
                "degrees"
            )
        self.group, self.in_channels, self.channels, self.patch_size = group, in_channels, channels, patch_size
        self.lifts, self.pool = lifts, pool
        pixels = patch_size**group.dim
        self.weight = nn.Parameter(torch.empty(channels, in_channels, (1 if lifts else len(group)) * pixels))
        self.bias = nn.Parameter(torch.zeros(channels))
        nn.init.normal_(self.weight, std=math.sqrt(2 / (in_channels * self.weight.shape[2])))
        self.index = Tables(functools.partial(_rotated_patches, group, patch_size, lifts))
        rates = [drop_path * n / max(num_layers - 1, 1) for n in range(num_layers)]
        options: dict[str, Any] = {"heads": heads, "mlp_ratio": mlp_ratio, "dropout": dropout}
        blocks = (FrameTransformerBlock(group, channels, drop_path=rate, **options) for rate in rates)
        self.blocks = nn.ModuleList(blocks)
        self.gain = nn.Parameter(torch.ones(channels))
        self.head = nn.Linear(channels, out_channels) if pool else GroupLinear(group, channels, out_channels)
        self.fourier = Tables(functools.partial(fourier_basis, group))

    @classmethod
    def tiny(cls, group: FiniteGroup, in_channels: int, out_channels: int, **kwargs: Any) -> FrameTransformer:
        """12 blocks of width :math:`|H| C` = 192, or the next larger one that fits. Arguments of
        :class:`FrameTransformer` in ``kwargs`` replace those of the preset."""
        return cls(group, in_channels, out_channels, **_of_width(192, group) | kwargs)

    @classmethod
    def small(cls, group: FiniteGroup, in_channels: int, out_channels: int, **kwargs: Any) -> FrameTransformer:
        """12 blocks of width 384, as :meth:`tiny`."""
        return cls(group, in_channels, out_channels, **_of_width(384, group) | kwargs)

    @classmethod
    def base(cls, group: FiniteGroup, in_channels: int, out_channels: int, **kwargs: Any) -> FrameTransformer:
        """12 blocks of width 768, as :meth:`tiny`."""
        return cls(group, in_channels, out_channels, **_of_width(768, group) | kwargs)

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of patches that contain a valid pixel."""
        return self._patches(mask[:, None]).any(-1).view(mask.shape[0], *self._grid(mask.shape[1:]))

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        """Invariants, or regular features with ``pool=False``.

        Args:
            x: Images, volumes, or regular features with ``lifts=False``.
            mask: Bool ``(B or 1, *spatial)``, true at valid pixels. Others are set to zero. Patches without a valid
                pixel change no result, and their outputs are zero. ``None`` means that all pixels are valid.
        """
        rows, patches = self._coefficients(x, mask)
        basis = self.fourier(rows.device, rows.dtype)[0]
        if not self.pool:
            out = cast(GroupLinear, self.head).to_coordinates(rows.flatten(0, 1), self.gain)
            return zero_where_masked(self._on_grid(out.unflatten(1, rows.shape[:2]), x), patches)
        if patches is None:
            mean = rows.mean(1)
        else:
            valid = patches.pixels.flatten(1)[..., None]
            mean = (rows * valid).sum(1) / valid.sum(1).clamp(min=1)
        return self.head((basis @ mean.unflatten(1, (len(basis), -1)) * self.gain).amax(1))

    def features(self, x: Tensor, mask: Mask = None) -> Tensor:
        """The regular features of patches before the last map, ``(B, channels, |H|, *spatial / patch_size)``."""
        rows, patches = self._coefficients(x, mask)
        coordinates = rows.unflatten(2, (len(self.group), -1)).movedim(2, 0)
        return zero_where_masked(
            self._on_grid(coordinates, x) * self.gain.view(-1, *[1] * (1 + self.group.dim)), patches
        )

    def _grid(self, spatial: Sequence[int]) -> list[int]:
        return [side // self.patch_size for side in spatial]

    def _coefficients(self, x: Tensor, mask: Mask) -> tuple[Float[Tensor, "B patches H*C"], Checked | None]:
        """Normalised Fourier coefficients of the patches after all blocks, and the mask of patches."""
        elements = None if self.lifts else len(self.group)
        checks.features(x, self.in_channels, self.group.dim, elements, self.weight)
        axis, side = 2 if self.lifts else 3, self.patch_size
        if any(n % side for n in x.shape[axis:]):
            wanted = tuple(-(-n // side) * side for n in x.shape[axis:])
            raise ValueError(
                f"input sides must be multiples of patch_size={side}, got {tuple(x.shape[axis:])}; pad images to "
                f"{wanted} pixels with torch.nn.functional.pad, and pass a mask; equal margins at opposite sides keep "
                "the symmetry exact"
            )
        x, checked = enter(x, mask, axis)
        patches = None if checked is None else Checked(self.mask_after(checked.pixels))
        index, basis = self.index(x.device), self.fourier(x.device, self.weight.dtype)[0]
        weight = self.weight.index_select(2, index.flatten()).unflatten(2, (len(basis), -1))
        with full_precision(x.device):
            weight = basis.T @ weight.permute(2, 0, 1, 3).flatten(1)  # coefficients of the filters
        bias = F.pad(self.bias * len(basis) ** 0.5, (0, (len(basis) - 1) * self.channels))
        rows = F.linear(self._patches(x.flatten(1, axis - 1)), weight.view(len(bias), -1), bias).to(weight.dtype)
        places = centred_positions(self._grid(x.shape[axis:]), x.device, torch.promote_types(x.dtype, torch.float32))
        keys = None if patches is None else patches.pixels.flatten(1)
        for block in self.blocks:
            rows = cast(FrameTransformerBlock, block).transform(rows, places[None], keys)
        return normalised(rows), patches

    def _patches(self, x: Float[Tensor, "B channels *spatial"]) -> Float[Tensor, "B patches channels*pixels"]:
        dim, side = self.group.dim, self.patch_size
        for axis, n in enumerate(self._grid(x.shape[2:])):
            x = x.unflatten(2 + 2 * axis, (n, side))
        grid, pixels = range(2, 2 + 2 * dim, 2), range(3, 3 + 2 * dim, 2)
        return x.permute(0, *grid, 1, *pixels).flatten(1 + dim).flatten(1, dim)

    def _on_grid(self, coordinates: Float[Tensor, "H B patches C"], x: Tensor) -> Float[Tensor, "B C H *grid"]:
        basis = self.fourier(coordinates.device, coordinates.dtype)[0]
        out = (basis @ coordinates.flatten(1)).view(coordinates.shape).permute(1, 3, 0, 2)
        return out.reshape(*out.shape[:3], *self._grid(x.shape[-self.group.dim :]))

    def extra_repr(self) -> str:
        return (
            f"{self.group!r}, {self.in_channels}, patch_size={self.patch_size}, channels={self.channels}, "
            f"lifts={self.lifts}, pool={self.pool}"
        )


def _heads(channels: int) -> int:
    """The number of heads whose width is nearest to 48 channels, by ratio."""
    divisors = (n for n in range(1, channels + 1) if channels % n == 0)
    return min(divisors, key=lambda n: abs(math.log(channels / n / 48)))


def _of_width(width: int, group: FiniteGroup) -> dict[str, int]:
    """Arguments of a model whose channels are an even number for each group element."""
    return {"channels": 2 * -(-width // (2 * len(group))), "num_layers": 12}


def _places(x: Tensor, positions: Tensor | None, dim: int) -> Float[Tensor, "#B tokens d"]:
    """Positions of tokens of features (B, C, |H|, *spatial), given or on a grid."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if positions is None:
        return centred_positions(x.shape[3:], x.device, dtype)[None]
    shapes = [(x.shape[3], dim), (x.shape[0], x.shape[3], dim)]
    checks.tensor("positions", positions, "real numbers", shapes, x.device)
    return (positions if positions.ndim == 3 else positions[None]).to(dtype)


def _rotated_patches(group: FiniteGroup, side: int, lifts: bool) -> Int[Tensor, "H S pixels"]:
    """Indices of h^-1 s and h^-1 x among the elements and pixels of a filter, for each element h."""
    pixels = torch.arange(side**group.dim, device="cpu").view([side] * group.dim)
    rotated_pixels = [transform_grid(pixels, m).flatten() if side > 1 else pixels.flatten() for m in group.matrices]
    count = len(group)
    elements = torch.zeros(count, 1, dtype=torch.int64, device="cpu") if lifts else relation_index(group, "relative")
    return elements[:, :, None] * pixels.numel() + torch.stack(rotated_pixels)[:, None]
