"""Cross attention: queries of one feature map, keys and values of another on the same grid; and residual branches."""

import pytest
import torch
from group_layers import block as small_block
from group_layers import image
from small_groups import GROUPS

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention
from tg_equiattn.nn.group.block import Residual
from tg_equiattn.testing import equivariance_error

D4 = GROUPS["D4"]


@pytest.mark.parametrize("kind", [GroupAttention, GlobalGroupAttention])
@pytest.mark.parametrize("channels", [None, 5])
def test_blocks(channels, kind, randomise):
    """The context goes through a norm: of its own if it has channels of its own."""
    block = randomise(small_block(D4, 3, 4, kind, context_channels=channels, norm="global")).double()
    assert (block.context_norm is None) == (channels is None)
    x, context = image(D4, (5, 6), True), torch.randn(2, channels or 3, 8, 5, 6, dtype=torch.float64)
    _, swish, attention, *_ = block.attention
    out = block(x, context=context)
    seen = swish((block.context_norm or block.attention[0])(context))
    y = block.shortcut(x) + block.attention[3:](attention(swish(block.attention[0](x)), context=seen))
    torch.testing.assert_close(out, y + block.mlp(y), rtol=0, atol=1e-12)
    both = lambda stacked: block(stacked[:, :3], context=stacked[:, 3:])  # noqa: E731
    assert equivariance_error(both, D4, torch.cat([x, context], 1)) <= 1e-10
    square = torch.randn(2, context.shape[1], 8, 5, 5, dtype=torch.float64)
    assert equivariance_error(lambda x: block(x, context=square), D4, image(D4, (5, 5), True)) > 1e-3


def test_layer_scale_and_drop_path():
    """Branches are scaled by channel, and left out image by image, in training alone; their mean is kept."""
    branch, x = torch.randn(1, 3, 4, 2, 2), torch.zeros(3000, 3, 4, 2, 2)
    residual = Residual(3, layer_scale=0.1, drop_path=0.25)
    assert "layer_scale=0.1, drop_path=0.25" in repr(residual)
    torch.testing.assert_close(residual.eval()(x[:1], branch), 0.1 * branch)
    out = residual.train()(x, branch.expand_as(x)).detach()
    kept = (out.flatten(1) != 0).all(1)
    assert torch.equal(kept, (out.flatten(1) != 0).any(1))
    torch.testing.assert_close(out[kept], (0.1 / 0.75 * branch).expand_as(out[kept]))
    assert abs(float(kept.float().mean()) - 0.75) < 0.03
    assert [n for n, _ in Residual(3).named_parameters()] == []
