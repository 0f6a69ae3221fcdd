"""Every public function and layer that has a fused kernel, called with a backend."""

import torch

from tg_equiattn import functional as F
from tg_equiattn import nn as layers
from tg_equiattn.encodings import relation_index
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic

C2, SMALL = cyclic(2), {"heads": 1, "kernel_size": 3}


def _group_attention(backend):
    x, rho = torch.ones(1, 1, 2, 2, 3, 3), torch.ones(2, 9, 2)
    index = relation_index(C2, "ge_vit")
    return F.group_attention(x, x, x, rho, rho[:, 0], index, neighbourhood=Neighbourhood(2, 3), backend=backend)


def _lifting_attention(backend):
    x, rho = torch.ones(1, 1, 2, 3, 3), torch.ones(2, 9, 2)
    return F.lifting_attention(x, x, x, rho, neighbourhood=Neighbourhood(2, 3), backend=backend)


FUNCTIONS = {
    "group_attention": _group_attention,
    "lifting_attention": _lifting_attention,
}


def group_attention(backend):
    return layers.GroupAttention(C2, 2, 2, **SMALL, relation="ge_vit", options={"backend": backend})


LAYERS = {
    "LiftingAttention": lambda b: layers.LiftingAttention(C2, 1, 2, **SMALL, options={"backend": b}),
    "GroupAttention": group_attention,
    "GroupAttentionBlock": lambda b: layers.GroupAttentionBlock(group_attention(b)),
    "GEViT": lambda b: layers.GEViT(C2, 1, 3, channels=(4,), **SMALL, relation="ge_vit", attention={"backend": b}),
}

INPUTS = {
    "LiftingAttention": (torch.ones(1, 1, 3, 3),),
    "GroupAttention": (torch.ones(1, 2, 2, 3, 3),),
    "GroupAttentionBlock": (torch.ones(1, 2, 2, 3, 3),),
    "GEViT": (torch.ones(1, 1, 3, 3),),
}


def call(name, backend):
    """Make the layer and call it, or call the function."""
    if name in FUNCTIONS:
        return FUNCTIONS[name](backend)
    return LAYERS[name](backend)(*INPUTS[name])


def refusals(backend):
    """What each says when it is called with a backend; empty where it runs."""
    out = {}
    for name in FUNCTIONS | LAYERS:
        try:
            call(name, backend)
            out[name] = ""
        except ValueError as error:
            out[name] = str(error)
    return out
