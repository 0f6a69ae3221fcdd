"""Small lifting and group attention layers, inputs for them, and what they compute by definition."""

import functools

import torch
from oracles import attention_by_definition, positive_features, relation_argument, separable_by_definition

from tg_equiattn.groups import DilationGroup, cyclic, dihedral, mirror, octahedral, trivial
from tg_equiattn.nn import (
    GlobalGroupAttention,
    GroupAttention,
    GroupAttentionBlock,
    LiftingAttention,
    ScaleGroupAttention,
    ScaleLiftingAttention,
)

BLOCK = {"norm", "crop"}  # its dropout is said at the block itself


def layer(kind, group, in_channels=3, out_channels=7, **arguments):
    if isinstance(group, DilationGroup):
        kind = {LiftingAttention: ScaleLiftingAttention, GroupAttention: ScaleGroupAttention}[kind]
        arguments.pop("relation", None)  # it has one
    return kind(group, in_channels, out_channels, **{"heads": 2, "kernel_size": 3, "encoding": "axial"} | arguments)


def lifting(group, **arguments):
    return layer(LiftingAttention, group, **{"head_channels": 5} | arguments)


def attention(group, **arguments):
    return layer(GroupAttention, group, **{"head_channels": 5} | arguments)


def image(group, spatial, regular, dtype=torch.float64, batch=2):
    return torch.randn(batch, 3, *([len(group)] if regular else []), *spatial, dtype=dtype)


def everywhere(group, **arguments):
    return layer(GlobalGroupAttention, group, **{"head_channels": 5, "relation": "relative"} | arguments)


def block(group, in_channels=3, out_channels=7, kind=GroupAttention, **arguments):
    """A block around a layer of arguments among which are those of the block."""
    own = {name: arguments.pop(name) for name in BLOCK & arguments.keys()}
    return GroupAttentionBlock(layer(kind, group, in_channels, out_channels, **arguments), **own)


@torch.no_grad()
def scaled(layer, scale):
    """The layer with scores that are multiplied with this number rather than by the root of the head's width."""
    for parameter in layer.query.parameters():
        parameter *= scale * layer.head_channels**0.5
    return layer


LAYERS = {
    "lifting": lifting,
    **{r: functools.partial(attention, relation=r) for r in ("frame", "ge_vit", "lifted", "relative")},
    "global": everywhere,
    "global frame": functools.partial(everywhere, relation="frame"),
}


def oracle(layer, x, relation, context=None, there=None, mask=None):
    """The layer by its definition, one (pixel, h, t) at a time, offset by offset; ``there`` (pixels,) is the mask of
    the keys, ``mask`` that of the queries."""
    lifts, scales = isinstance(layer, LiftingAttention), getattr(layer.group, "scales", None)
    isometries = layer.group.isometries if scales else layer.group
    matrices, each = isometries.matrices.repeat(scales or 1, 1, 1), len(isometries)
    q, k, v = (p.unsqueeze(3) if lifts else p for p in layer.project(x, context))
    sides = torch.tensor(layer.window.sides[::-1])
    spatial = tuple(x.shape[-layer.group.dim :])
    scale = layer.window.scale(spatial)

    def rho(offset, u):
        if layer.encoding is None:
            return q.new_zeros(layer.head_channels)
        space, group = layer.encoding((offset / scale).view(1, 1, -1))
        if space.ndim == 4:
            return space[0, 0, u]
        return space[0, 0] if group is None else space[0, 0] + group[u]

    def inside(offset):
        if layer.window.shape == "disk":
            return bool((2 * offset / sides).norm() <= 1)
        every = layer.window.is_global
        return every or bool((offset.abs() <= sides // 2).all() and torch.equal(offset, offset.round()))

    def argument(h, t, s):
        if lifts:
            return 0
        if relation in ("relative", "frame") and t != h:
            return None
        if relation == "frame":
            return 0 if s == h else None
        if not scales:
            return relation_argument(matrices, relation, h, t, s)
        apart = s // each - h // each + layer.scale_window // 2
        turn = relation_argument(isometries.matrices, relation, h % each, t % each, s % each)
        return apart * each + turn if 0 <= apart < layer.scale_window else None

    frames, count = relation == "frame", q.shape[1]

    def places(offset):
        distance = (offset - layer.locality.centre).square().sum(-1)
        return -layer.locality.locality_strength.abs() * distance

    def bias(offset, u):
        return (0 if lifts or frames else layer.locality.preference[:, u]) + places(offset)[:count]

    number = (k[0, 0, 0, :1] if frames else k[0, 0, 0]).numel()
    if there is not None:
        number = int(there.sum()) * (1 if frames else k.shape[3])

    def far(query, key, arguments):
        projection = layer.features.directions(query.device, query.dtype)
        root = layer.head_channels**-0.25
        phi_q = positive_features(query * root, projection)  # (B, heads, m)
        phi_k = positive_features(key.movedim(2, -1) * root, projection)  # (B, heads, S, keys, m)
        weight = torch.einsum("bnm,bnskm->bnks", phi_q, phi_k) / len(projection)
        return weight * layer.far_bias[:, arguments].exp()[:, None] / number

    out = attention_by_definition(
        q, k, v[:, :count], rho, matrices, argument=argument, inside=inside,
        strides=[2 ** (h // each) for h in range(len(matrices))],
        scale=layer.head_channels**-0.5, bias=bias if layer.locality is not None else None, there=there,
        circular=layer.window.circular,
        far=far if isinstance(layer, GlobalGroupAttention) else None,
    )  # fmt: skip
    if count < v.shape[1]:
        window = layer.window.offsets(spatial).double()
        by_place = separable_by_definition(
            v[:, count:].expand(-1, -1, -1, len(matrices), *spatial), layer.group.matrices, inside=inside,
            bias=lambda x: places(x)[count:], offsets=window, there=there, circular=layer.window.circular,
        )  # fmt: skip
        out = torch.cat([out, by_place], 1)
    out = layer.out(out.flatten(1, 2))
    return out if mask is None else out * mask.view(out.shape[3:])


def images_by_oracle(layer, name, x, masks=None, context=None, context_masks=None):
    """The oracle of a layer of :data:`LAYERS` for a batch, image by image. By default keys have the mask of queries."""
    relation = {"lifting": None, "global": "relative", "global frame": "frame"}.get(name, name)
    context_masks = masks if context_masks is None else context_masks

    def one(n):
        mask, there = (None if y is None else y[n].flatten() for y in (masks, context_masks))
        return oracle(layer, x[n : n + 1], relation, None if context is None else context[n : n + 1], there, mask)

    return torch.cat([one(n) for n in range(len(x))])


def kept_for_backward(layer, x):
    """Bytes that autograd keeps of a call."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(sizes.values())


PLANAR = {"C2": cyclic(2), "C4": cyclic(4), "C8": cyclic(8), "D2": dihedral(2), "D4": dihedral(4), "mirror": mirror()}
GROUPS = {**PLANAR, "octahedral": octahedral(), "trivial": trivial()}
