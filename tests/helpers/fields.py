"""Fields of escnn and our layers between them, for gspaces of images and of volumes."""

import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

import torch
from tg_equiattn.integrations import escnn

GSPACES = {
    "rot4": gspaces.rot2dOnR2(4),
    "rot8": gspaces.rot2dOnR2(8),
    "flipRot4": gspaces.flipRot2dOnR2(4),
    "flipRot2": gspaces.flipRot2dOnR2(2),
    "flip": gspaces.flip2dOnR2(),
    "flip_other_axis": gspaces.flip2dOnR2(axis=0.0),
    "trivial": gspaces.trivialOnR2(),
    "half turns": gspaces.dihedralOnR3(2),
    "mirror": gspaces.mirOnR3(),
}


def trivial(gspace, n=3):
    return nn.FieldType(gspace, n * [gspace.trivial_repr])


def regular(gspace, n=6):
    return nn.FieldType(gspace, n * [gspace.regular_repr])


def field(field_type, *shape):
    return nn.GeometricTensor(torch.randn(*shape[:1], field_type.size, *shape[1:], dtype=torch.float64), field_type)


def of(gspace, kind):
    """The class of this kind for a gspace: ``of(gspace, "GroupAttention")``, or escnn's own, ``of(gspace, "Conv")``."""
    name = f"R{gspace.dimensionality}{kind}"
    return getattr(escnn, name, None) or getattr(nn, name)


def sides(gspace, *image):
    """The sides of an image, or those of a small volume where the gspace is one of volumes."""
    return image if gspace.dimensionality == 2 else (3, 5, 4)


def block(attention, **options):
    return of(attention.space, "AttentionBlock")(attention, **options)


def layers(gspace, few=False):
    """Every module; the costly relations where the group is small."""
    image, hidden, wider = trivial(gspace, 2), regular(gspace, 2), regular(gspace, 3)
    lifting, group, everywhere, norm = (
        of(gspace, kind) for kind in ("LiftingAttention", "GroupAttention", "GlobalAttention", "RegularLayerNorm")
    )
    options = {"heads": 4 - gspace.dimensionality, "head_channels": 4, "kernel_size": 3}
    made = [lifting(image, hidden, **options), group(hidden, wider, relation="relative", **options), norm(hidden)]
    if not few:
        made += [everywhere(hidden, wider, num_random_features=5, **options), group(hidden, wider, **options)]
        made.append(block(group(hidden, wider, relation="lifted", **options), crop=1))
    if gspace.dimensionality == 2:
        options |= {"kernel_size": None, "relation": "relative", "encoding": "joint"}
        made.append(group(hidden, hidden, **options))
    return made
