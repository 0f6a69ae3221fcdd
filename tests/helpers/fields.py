"""Fields of escnn and our layers between them, for gspaces of images and of volumes."""

import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import nn

from tg_equiattn.integrations import escnn


def trivial(gspace, n=3):
    return nn.FieldType(gspace, n * [gspace.trivial_repr])


def regular(gspace, n=6):
    return nn.FieldType(gspace, n * [gspace.regular_repr])


def of(gspace, kind):
    """The class of this kind for a gspace: ``of(gspace, "GroupAttention")``, or escnn's own, ``of(gspace, "Conv")``."""
    name = f"R{gspace.dimensionality}{kind}"
    return getattr(escnn, name, None) or getattr(nn, name)


def sides(gspace, *image):
    """The sides of an image, or those of a small volume where the gspace is one of volumes."""
    return image if gspace.dimensionality == 2 else (3, 5, 4)


def block(attention, **options):
    """The residual block around an attention layer."""
    return of(attention.space, "AttentionBlock")(attention, **options)
