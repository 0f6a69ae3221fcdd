"""Position encodings of linear attention."""

import torch

from tg_equiattn.encodings.positions import AbsoluteEncoding


def test_absolute():
    encoding = AbsoluteEncoding(12, pos_dim=3)
    pos = torch.tensor([[2.0, 0.5, -1.0]]).double()
    expected = [f(w * p) for p in pos[0] for w in (1, 0.01) for f in (torch.sin, torch.cos)]
    torch.testing.assert_close(encoding(pos)[0], torch.stack(expected))
