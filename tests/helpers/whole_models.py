"""Whole models as functions of one tensor, for CUDA graphs."""

import torch
from torch import nn

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GEViT, RelativePerformer, SE3Hyena

SMALL = {"hidden_scalars": 8, "hidden_vectors": 8, "num_layers": 2}
NO_DROPOUT = dict.fromkeys(("dropout", "input_dropout", "pool_dropout"), 0.0)
MODELS = {
    "GEViT": lambda: GEViT.rotmnist(cyclic(4), channels=(8, 8), heads=2, pools=(), crops=0, **NO_DROPOUT),
    "RelativePerformer": lambda: RelativePerformer(1, 10, channels=16, num_layers=2, heads=2, cutoff=3, dropout=0.0),
    "SE3Hyena": lambda: SE3Hyena(3, 2, 0, 1, order="radial", **SMALL),
    "SE3Hyena attention": lambda: SE3Hyena(3, 2, 0, 1, attention=True, **SMALL),
}


class Fixed(nn.Module):
    """A model as a function of one tensor, for inputs of a fixed shape."""

    def __init__(self, name):
        super().__init__()
        self.model = MODELS[name]()
        self.images = name.startswith(("GEViT", "RelativePerformer"))

    def sample(self, device):
        return torch.rand(4, 1, 12, 12, device=device) if self.images else torch.randn(4, 17, 12, device=device)

    def forward(self, x):
        if self.images:
            return self.model(x)
        return self.model(x[..., :3], x[..., 3:9].unflatten(-1, (2, 3)), pos=x[..., 9:])[1]
