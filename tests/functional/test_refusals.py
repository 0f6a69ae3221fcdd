"""What functions of linear attention, vectors and long convolutions refuse: each error names the argument."""

import pytest
import torch

from tg_equiattn import functional as F
from tg_equiattn.grids import PixelGrid

NEAR = PixelGrid((5, 7), 3).neighbors()
WINDOW = {
    **dict.fromkeys(("query", "key", "value"), torch.ones(35, 3, 5)), "projection": torch.ones(11, 5),
    "pair_bias": torch.ones(3, len(NEAR.offsets)), "self_bias": torch.ones(3), "neighbors": NEAR,
}  # fmt: skip
FEW = dict.fromkeys(("query", "key", "value"), torch.ones(30, 3, 5))
Q, W, V, S, X = torch.ones(2, 3, 5, 7), torch.ones(11, 7), torch.ones(3, 5, 2, 3), torch.ones(3, 5, 2), torch.ones(8)


def linear(*tensors, **options):
    return lambda: F.linear_attention(*tensors, **options)


def flat(**options):
    return linear(Q[0], Q[0], Q[0], W, **options)


def window(**change):
    return lambda: F.window_attention(**WINDOW | change)


def attention(*arguments):
    return lambda: F.vector_attention(*arguments)


def scalars(*arguments):
    return lambda: F.scalar_long_conv(*arguments)


def vectors(x):
    return lambda: F.vector_long_conv(x, x)


def product(x, y):
    return lambda: F.geometric_product(x, y)


REFUSED = [
    ("query, key and value must be", linear(Q, Q[..., :3], Q, W)),
    (r"projection must be \(m, 7\), got \(11, 5\)", linear(Q, Q, Q, W[:, :5])),
    ("projection must not require", linear(Q, Q, Q, W.clone().requires_grad_())),
    ("mask must be bool", linear(Q, Q, Q, W, mask=torch.ones(2, 5))),
    ("mask must be None", flat(mask=torch.ones(3, dtype=torch.bool))),
    ("batch must be None", linear(Q, Q, Q, W, batch=torch.zeros(2).long())),
    ("batch must be sorted", flat(batch=torch.tensor([0, 1, 0]))),
    ("batch must be int64", flat(batch=torch.zeros(3))),
    ("batch must be in", flat(batch=torch.tensor([0, 1, 2]), batch_size=2)),
    ("batch must be given", flat(batch_size=2)),
    ("query, key and value must be", window(key=torch.ones(5, 3, 5))),
    ("projection must be", window(projection=torch.ones(11, 2))),
    (r"pair_bias must have shape \(3, \d+\), got \(2,", window(pair_bias=WINDOW["pair_bias"][:2])),
    ("self_bias must have shape", window(self_bias=torch.ones(2))),
    ("far_bias must have shape", window(far_bias=torch.ones(2))),
    ("neighbors must be of 30 nodes, got 35", window(**FEW)),
    ("batch must be sorted", window(batch=torch.arange(35).flip(0))),
    ("q must hold vectors, 3 components", attention(V[..., :2], V[..., :2], V[..., :2])),
    ("q must have 4 axes", attention(V[0], V[0], V[0])),
    ("k must have the shape of q", attention(V, V[:, :4], V)),
    ("v must have the shape of q", attention(V, V, V[:, :, :1])),
    ("q must be a floating", attention(V.long(), V, V)),
    ("v must be a floating", attention(V, V, V.int())),
    ("v must be torch.float32", attention(V, V, V.double())),
    ("q must be float32 or float64", attention(V.half(), V.half(), V.half())),
    (r"lengths must be int64 of shape \(3,\)", attention(V, V, V, torch.ones(3))),
    (r"lengths must be in \[0, 5\]", attention(V, V, V, torch.tensor([6, 1, 1]))),
    ("q must hold vectors, 3 components", vectors(V[..., :2])),
    ("q must have 4 axes", vectors(S)),
    ("q must have 3 axes", scalars(V, V)),
    ("q must be a floating", scalars(S.long(), S.long())),
    ("k must be a floating", scalars(S, S.long())),
    ("k must have the shape of q", scalars(S, S[:, :, :1])),
    ("k must be torch.float32", scalars(S, S.double())),
    ("q must be float32 or float64", scalars(S.half(), S.half())),
    ("mode must be one of", scalars(S, S, None, "cyclic")),
    (r"lengths must be int64 of shape \(3,\)", scalars(S, S, torch.ones(3))),
    (r"lengths must be in \[0, 5\]", scalars(S, S, torch.tensor([1, 2, 6]))),
    ("x must have 8 components", product(torch.ones(3, 7), torch.ones(3, 8))),
    ("y must have 8 components", product(torch.ones(3, 8), torch.ones(8, 3))),
    ("x must be a floating", product(X.long(), X)),
    ("y must be a floating", product(X, X.long())),
    ("y must be torch.float32", product(X, X.double())),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
