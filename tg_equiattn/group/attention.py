"""Layers of lifting, group and global self-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..groups import Group
from ..linear.random_features import DrawsFeatures, RandomFeatures
from .attention_layer import AttentionLayer
from .heads import attention_of_heads, global_attention, lifting_by_position
from .layers import Pointwise, pointwise

FAR = 4.0  # initial f of every second head; with strong locality the weights of a window sum to about e^2 to e^3


@checks.arguments_of(AttentionLayer, "relation")
class LiftingAttention(AttentionLayer):
    r"""Lifting self-attention: images or volumes in, regular features out. By default, one head of eight has content.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_{j \in \eta(i)}
        \mathrm{softmax}_j\big(c\,\langle q_i,\; k_j + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v_j

    with the locality l of the head and :math:`c = 1/\sqrt{\mathrm{head\_channels}}`.

    Args:
        group: The finite group H. Its dimension (2 or 3) is that of the input.
        in_channels: Channels of the input.
        out_channels: Channels of the output, for each group element.
        heads: Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x 3
            window, 27 a cube.
        head_channels: Channels of queries, keys and values in each head. ``None`` means ``out_channels / heads``,
            rounded up, but at least one for each axis of the image, and an even number for ``"rotary"``.
        kernel_size: Odd side of the window in pixels, a side for each axis, such as ``(3, 5, 5)`` for thick slices, or
            ``None`` for attention to all pixels, at any image size. All group elements must keep the window. A window
            may be larger than the image; pixels outside are masked.
        window_shape: ``"square"`` or ``"disk"``. ``None`` means a disk if the group has elements that do not map the
            pixel grid to itself (rotations by 45 degrees), since a square is not symmetric under them; else a square.
        padding_mode: ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side, so that
            the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        encoding: Encoding of relative positions. ``"rotary"``, for all pixels, rotates queries and keys by angles
            :math:`\omega \cdot h^{-1} x` with learned frequencies and positions x in pixels from the middle of the
            image; torch's fused attention then needs no table of pairs. ``"axial"`` is one MLP for each axis, as
            published; ``"joint"`` one MLP of the whole offset. ``None`` is attention by content alone and needs
            ``kernel_size=None``. With ``"rotary"`` and ``None``, keys may come from an image of another size.
            ``"auto"`` means ``"rotary"`` over all pixels without locality, and otherwise ``"axial"``.
        locality: Strength of the locality in 1 / pixel^2, not negative. Head e adds :math:`-\alpha_e |h^{-1}(x_j - x_i)
            - \Delta_e|^2` to its scores; both parameters are learned. ``None`` means no locality, as in the
            papers. ``"auto"`` means ``None`` over all pixels; within a window 4, and 1 for groups with elements that do
            not map the pixel grid to itself.
        content_heads: Number of heads with queries and keys. The other heads weight pixels by position alone, which
            makes them a convolution (with zero padding for ``"mask"``). ``None`` means an eighth of the heads, rounded
            up, and all of them without locality or over all pixels.
        context_channels: Channels of the ``context`` of cross attention, which every call then needs. ``None`` is self
            attention; a call may still pass a context with ``in_channels``.
        stride: 1, or 2 for queries at every second pixel only, which give (n + 1) / 2 pixels for n. Keys are all pixels
            of the window. Sides must be odd, since every second pixel of even sides is not symmetric. A stride needs a
            ``kernel_size`` and ``padding_mode="mask"``, and takes no context.
        dropout: Probability, in training, of dropping an attention weight of a head with content.

    Shapes:
        ``(B, in_channels, H, W)`` or ``(B, in_channels, D, H, W)`` -> ``(B, out_channels, |H|, *spatial)``, with half
        the sides, rounded up, with a stride.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GSA-Nets Eq. 14; GE-ViT Eq. 14. Scales: GSA-Nets App. E, Eq. 20, without its factor :math:`1/h^d`, with
    which the layer is not equivariant.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dihedral
        >>> layer = LiftingAttention(dihedral(4), 3, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 3, 9, 7)).shape
        torch.Size([2, 20, 8, 9, 7])
    """

    lifts = True

    def _attend(self, x: Tensor, context: Tensor, key_mask: Tensor | None, dropout: float) -> Tensor:
        """Heads without content and the projections of their values and outputs are one convolution."""
        if self.content_heads == self.heads or self.window.is_global or x.shape[2:] != context.shape[2:]:
            return super()._attend(x, context, key_mask, dropout)
        terms, other = self._split(self._terms(tuple(x.shape[2:]), x.device))
        width, value = self.content_heads * self.head_channels, cast(Pointwise, self.value)
        widths, rest = (width, len(value.bias) - width), (-1, self.head_channels)
        weights, by_position = value.weight.squeeze(-1).split(widths)
        biases, bias_by_position = value.bias.split(widths)
        out_weights, out_by_position = self.out.weight.squeeze(-1).split(widths, 1)
        found = lifting_by_position(
            context, key_mask, by_position.unflatten(0, rest), bias_by_position.unflatten(0, rest),
            out_by_position.unflatten(1, rest), self.out.bias, cast(Tensor, other.space_bias), self.window,
        )  # fmt: skip
        if self.query is None or self.key is None:
            return found
        projected = self.query(x, self.head_channels**-0.5), self.key(context), pointwise(context, weights, biases)
        query, key, values = (y.unflatten(1, (self.content_heads, -1)).unsqueeze(3) for y in projected)
        heads, _ = attention_of_heads(query, key, values, terms, self.window, key_mask, dropout, self.plain)
        weight = out_weights.expand(x.shape[0], -1, -1)
        return torch.baddbmm(found.flatten(2), weight, heads.flatten(1, 2).flatten(2)).view_as(found)


class GroupAttention(AttentionLayer):
    r"""Group self-attention: regular features of a finite group in and out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_t \sum_{(j,s)} \mathrm{softmax}_{(j,s)}\big(
        c\,\langle q(i,t),\; k(j,s) + \rho(h^{-1}(x_j - x_i), u) \rangle + l(h^{-1}(x_j - x_i), u)\big)\; v(j, s)

    with the locality l of the head. With the default ``relation="frame"`` every element attends to the same element of
    other pixels, and elements meet in the linear map of the values (:class:`GroupLinear`):

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_j \mathrm{softmax}_j\big(
        c\,\langle q(i,h),\; k(j,h) + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v(j, h), \qquad
        v(j, h) = \sum_s W_v[h^{-1} s]\; x(j, s) .

    With one head for each offset, strong locality and no content this is a group convolution.

    **All pixels.** ``kernel_size=None`` changes more than the number of keys. There is no locality by default, so every
    pixel has weight in a new layer, and positions are rotary with ``"frame"`` and ``"relative"``. Other encodings see
    offsets divided by the largest offset in the image instead of the window's radius. All heads have content. With
    ``"frame"`` the projections of queries and keys mix group elements too (:class:`GroupLinear`), so that a head can
    compare element h with another one; keys start as the queries of an element that differs from head to head. With
    ``"relative"`` and rotary positions, keys start as the queries. Time grows with the square of the number of pixels,
    and so does memory with ``"axial"`` and ``"joint"`` encodings and with locality. There is no circular padding.

    Args:
        group: The finite group H. Its dimension (2 or 3) is that of the input.
        in_channels: Channels of the input, for each group element.
        out_channels: Channels of the output, for each group element.
        heads: Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x 3
            window, 27 a cube.
        head_channels: Channels of queries, keys and values in each head. ``None`` means ``out_channels / heads``,
            rounded up, but at least one for each axis of the image, plus one with a relation other than ``"frame"``,
            and an even number for ``"rotary"``.
        kernel_size: Odd side of the window in pixels, a side for each axis, such as ``(3, 5, 5)`` for thick slices, or
            ``None`` for attention to all pixels, at any image size. All group elements must keep the window. A window
            may be larger than the image; pixels outside are masked.
        window_shape: ``"square"`` or ``"disk"``. ``None`` means a disk if the group has elements that do not map the
            pixel grid to itself (rotations by 45 degrees), since a square is not symmetric under them; else a square.
        padding_mode: ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side, so that
            the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        relation: Which group elements meet. ``"frame"``: h attends to h. The others compare all elements, and name the
            element u that the encoding sees: ``"ge_vit"`` (:math:`h^{-1}ts^{-1}t`), ``"lifted"`` (:math:`t^{-1}s`),
            ``"relative"`` (:math:`t^{-1}s` with h = t only, :math:`|H|` times less work) and ``"gsa"``
            (:math:`h^{-1}t^{-1}s`), which is **not equivariant**, warns, and serves to reproduce the papers'
            comparison.
        encoding: Encoding of relative positions. ``"rotary"``, for all pixels with ``"frame"`` or ``"relative"``,
            rotates queries and keys by angles :math:`\omega \cdot h^{-1} x` with learned frequencies and positions x in
            pixels from the middle of the image; torch's fused attention then needs no table of pairs. With
            ``"relative"``, keys of element s first get an embedding of :math:`h^{-1} s`. ``"axial"`` is one MLP for
            each axis, as published; ``"joint"`` one MLP of the whole offset. ``None`` is attention by content alone and
            needs ``kernel_size=None``. With ``"rotary"`` and ``None``, keys may come from an image of another size.
            ``"auto"`` means ``"rotary"`` over all pixels without locality with these relations, and otherwise
            ``"axial"``.
        locality: Strength of the locality in 1 / pixel^2, not negative. Head e adds :math:`-\alpha_e |h^{-1}(x_j - x_i)
            - \Delta_e|^2` to its scores; both parameters are learned. With ``"relative"`` every head starts with a
            preference for one group element as well. ``None`` means no locality, as in the papers. ``"auto"`` means
            ``None`` over all pixels; within a window 4, and 1 for groups with elements that do not map the pixel grid
            to itself.
        content_heads: Number of heads with queries and keys. The other heads weight pixels by position alone, which
            makes them a separable group convolution (with zero padding for ``"mask"``). ``None`` means half of the
            heads, rounded up, for ``"frame"`` within a window and with locality, and otherwise all of them.
        context_channels: Channels of the ``context`` of cross attention, which every call then needs. ``None`` is self
            attention; a call may still pass a context with ``in_channels``.
        stride: 1, or 2 for queries at every second pixel only, which give (n + 1) / 2 pixels for n. Keys are all pixels
            of the window. Sides must be odd, since every second pixel of even sides is not symmetric. A stride needs a
            ``kernel_size`` and ``padding_mode="mask"``, and takes no context.
        dropout: Probability, in training, of dropping an attention weight of a head with content.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``, with half the sides, rounded up,
        with a stride.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GSA-Nets Eq. 16; GE-ViT Eq. 16-17. u comes from the Cayley table, so the layer is equivariant for dihedral
    groups as well. Scores are divided by the square root of the head width; the published code divides by that of the
    layer's input width. ``"frame"`` is ours; Platonic Transformers (arXiv:2510.03511) use frames in three dimensions.
    Scales: GSA-Nets App. E, Eq. 21, without its factor :math:`1/h^{d+1}`.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> layer = GroupAttention(cyclic(4), 20, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 20, 4, 9, 7)).shape
        torch.Size([2, 20, 4, 9, 7])
    """

    old_arguments: ClassVar = {"scale_window": "ScaleGroupAttention has it"}


@checks.arguments_of(AttentionLayer, "content_heads", "stride")
class GlobalGroupAttention(DrawsFeatures, AttentionLayer):
    r"""Global group self-attention of regular features: exact weights within a window, random features beyond.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_j w\, v(j,h) \Big/ \sum_j w, \qquad
        w = \frac{e^f}{n} \langle \phi(q(i,h)), \phi(k(j,h)) \rangle
        + [j \text{ near } i]\, \exp\big(\mathrm{score}(i, h, j)\big)

    The score is that of :class:`GroupAttention` with relation ``"frame"`` (encodings and locality); all heads have
    content. With ``"relative"``, sums run over (j, s), the score is that of (i, h) and (j, s), and f depends on
    :math:`h^{-1}s`. n is the number of keys. Each head learns f, which starts at 0, or at 4 in every second head; these
    heads give most of their weight to distant pixels at the start. Time and memory are linear in the number of pixels,
    and images may have any size. The layer is exactly equivariant for every draw of the random features.

    Args:
        group: The finite group H. Its dimension (2 or 3) is that of the input.
        in_channels: Channels of the input, for each group element.
        out_channels: Channels of the output, for each group element.
        heads: Number of attention heads.
        head_channels: Channels of queries, keys and values in each head. ``None`` means ``out_channels / heads``,
            rounded up, but at least one for each axis of the image, plus one with ``"relative"``.
        kernel_size: Odd side of the window in pixels, within which weights are exact, or a side for each axis. All
            group elements must keep the window.
        window_shape: ``"square"`` or ``"disk"``. ``None`` means a disk if the group has elements that do not map the
            pixel grid to itself (rotations by 45 degrees), since a square is not symmetric under them; else a square.
        padding_mode: ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side.
        relation: ``"frame"``: element h attends to h. ``"relative"``: h attends to all elements s, and the encoding
            sees :math:`h^{-1}s`.
        encoding: Encoding of relative positions in the window. ``"axial"`` is one MLP for each axis, ``"joint"`` one
            MLP of the whole offset.
        locality: Strength of the locality in the window in 1 / pixel^2, not negative. Head e adds :math:`-\alpha_e
            |h^{-1}(x_j - x_i) - \Delta_e|^2` to its scores; both parameters are learned. With ``"relative"`` every head
            starts with a preference for one group element as well. ``"auto"`` means 4, and 1 for groups with elements
            that do not map the pixel grid to itself. ``None`` means no locality.
        num_random_features: Number of random features m. More features make the weights of distant pixels more accurate
            at proportional cost. ``None`` means :math:`d \log d`, d the width of a head, at least 16. Checkpoints store
            this number, the seed and the number of the draw.
        context_channels: Channels of the ``context`` of cross attention, which every call then needs. ``None`` is self
            attention; a call may still pass a context with ``in_channels``.
        dropout: Probability, in training, of dropping an attention weight of the window and an output of the random
            features.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GE-ViT Eq. 16 with h = t for the window; Choromanski et al. (2021) for the features; their sum is ours.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> layer = GlobalGroupAttention(cyclic(4), 20, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 20, 4, 9, 7)).shape
        torch.Size([2, 20, 4, 9, 7])
    """

    separates = False

    def __init__(
        self, group: Group, in_channels: int, out_channels: int, *, heads: int = 8,
        kernel_size: int | tuple[int, ...] = 5, relation: str = "frame", encoding: str = "axial",
        num_random_features: checks.Count | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        checks.choice("relation", relation, ("frame", "relative"))
        settings = {"kernel_size": kernel_size, "relation": relation, "encoding": encoding}
        super().__init__(group, in_channels, out_channels, heads=heads, **settings | arguments)
        width = self.head_channels
        if num_random_features is None:
            num_random_features = max(16, int(width * math.log(width)))
        self.features = RandomFeatures(num_random_features, width)
        self.far_bias = nn.Parameter(torch.zeros(heads, 1 if self.relation == "frame" else len(group)))
        with torch.no_grad():
            self.far_bias[1::2] = FAR

    def _fits(self, pixels: Sequence[int], keys: Sequence[int]) -> bool:
        return tuple(pixels) == tuple(keys)

    def _operands(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.project(x, context)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout: float, t: int | None = None,
        step: bool = True,
    ) -> Tensor:  # fmt: skip
        draw = self.features if step else self.features.directions
        projection = draw(query.device, torch.promote_types(query.dtype, torch.float32))
        terms = self._terms(tuple(query.shape[4:]), query.device)
        return global_attention(
            query, key, value, terms, self.window, projection, self.far_bias, key_mask, dropout, self.plain
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_random_features={self.features.num_random_features}"
