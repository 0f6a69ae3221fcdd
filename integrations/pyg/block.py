"""The Relative Performer's block on graphs."""

from typing import Any

from tg_equiattn.nn import PerformerBlock

from .conv import RelativePerformerConv


class RelativePerformerBlock(PerformerBlock):
    r"""Pre-norm transformer block around :class:`RelativePerformerConv`.

    .. math::
        \mathbf{h} = \mathbf{x} + \mathrm{Conv}(\mathrm{LayerNorm}(\mathbf{x})), \qquad
        \mathbf{x}^{\prime} = \mathbf{h} + \mathbf{W}_2\, \mathrm{GELU}(\mathbf{W}_1 \mathrm{LayerNorm}(\mathbf{h}))

    Args:
        channels (int): Size of each input and output sample, a multiple of :obj:`heads`.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        feedforward_channels (int, optional): Width of the feed-forward part; :obj:`None` means four times
            :obj:`channels`. (default: :obj:`None`)
        dropout (float, optional): Dropout probability of the feed-forward part. (default: :obj:`0.0`)
        attention_dropout (float, optional): Dropout probability of the attention's output. (default: :obj:`0.0`)
        **kwargs (optional): Additional arguments of :class:`RelativePerformerConv`.

    Shapes:
        As :class:`RelativePerformerConv`, whose :meth:`forward` arguments it takes.

    Example:
        >>> import torch
        >>> block = RelativePerformerBlock(16, heads=4, position="clipped", max_distance=3)
        >>> block(torch.randn(9, 16), pos=torch.cartesian_prod(torch.arange(3), torch.arange(3))).shape
        torch.Size([9, 16])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        *,
        feedforward_channels: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        **kwargs: Any,
    ):
        conv = RelativePerformerConv(channels, channels, heads, dropout=attention_dropout, **kwargs)
        super().__init__(conv, channels, feedforward_channels, dropout)
        self.channels, self.heads = channels, heads

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.channels}, heads={self.heads}, conv={self.attention})"
