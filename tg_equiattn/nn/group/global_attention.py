"""Group self-attention to all pixels in linear time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.group.global_attention import global_group_attention_impl
from ...groups import DilationGroup, FiniteGroup, check_group
from ..performer.random_features import DrawsFeatures, RandomFeatures
from .attention_layer import AttentionLayer

FAR = 4.0  # initial f of every second head; with strong locality the weights of a window sum to about e^2 to e^3


@checks.python_numbers
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
            rounded up, and at least one for each part of the axial encoding.
        kernel_size: Odd side of the window in pixels, within which weights are exact.
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
            at proportional cost. ``None`` means :math:`d \log d`, d the width of a head, at least 16.
        redraw_interval: Training steps between two draws of the random features. ``None`` keeps the first draw.
            Checkpoints store the seed, the number of the draw and the number of steps since.
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

    def __init__(
        self, group: FiniteGroup, in_channels: int, out_channels: int, *, heads: int = 8,
        head_channels: int | None = None, kernel_size: int = 5, window_shape: str | None = None,
        padding_mode: str = "mask", relation: str = "frame", encoding: str = "axial",
        locality: float | str | None = "auto", num_random_features: int | None = None,
        redraw_interval: int | None = None, context_channels: int | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        if isinstance(group, DilationGroup):
            raise ValueError(
                f"group must be finite, without scales, got {group!r}: scaling moves features up one scale, which "
                "changes the sum over all scales; use GroupAttention"
            )
        check_group(group)
        if kernel_size is None:
            raise ValueError(
                "kernel_size must be a positive odd integer: the window within which weights are exact, got None; for "
                "exact attention to all pixels use GroupAttention"
            )
        checks.choice("relation", relation, ("frame", "relative"))
        super().__init__(
            group, in_channels, out_channels, heads=heads, head_channels=head_channels, kernel_size=kernel_size,
            window_shape=window_shape, padding_mode=padding_mode, relation=relation, encoding=encoding,
            locality=locality, context_channels=context_channels, dropout=dropout,
        )  # fmt: skip
        width = self.head_channels
        if num_random_features is None:
            num_random_features = max(16, int(width * math.log(width)))
        self.features = RandomFeatures(num_random_features, width, redraw_interval)
        self.far_bias = nn.Parameter(torch.zeros(heads, 1 if self.relation == "frame" else len(group)))
        with torch.no_grad():
            self.far_bias[1::2] = FAR

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, index: Tensor | None, key_mask: Tensor | None,
        dropout: float, step: bool = True,
    ) -> Tensor:  # fmt: skip
        offset_encoding, element_encoding, space_bias, group_bias = self._scores(tuple(query.shape[4:]), query.device)
        draw = self.features if step else self.features.directions
        projection = draw(query.device, torch.promote_types(query.dtype, torch.float32))
        return global_group_attention_impl(
            query, key, value, projection, offset_encoding, element_encoding, index, self.far_bias, self.window,
            space_bias, group_bias, dropout, key_mask, self.plain,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_random_features={self.features.num_random_features}"
