"""Discrete gspaces of images, and every one of volumes, that escnn makes or restricts to."""

import contextlib
import functools
import io

import fields
import numpy as np
from fields import trivial

with contextlib.redirect_stdout(io.StringIO()):
    from escnn import gspaces, nn
    from escnn.group import o3_group

from tg_equiattn.integrations.escnn import group_from_gspace


def restricted(make, subgroup):
    return nn.RestrictionModule(trivial(make()), subgroup).out_type.gspace


def turned(angle_axis):
    """Four turns about another axis than z: an element of O(3) that escnn conjugates by."""
    return gspaces.rot2dOnR3(4, adjoint=o3_group().element((0, np.array(angle_axis)), "Q"))


HALF = np.sqrt(0.5)
IMAGES = {  # with the number of elements, and how many of them map pixels to pixels
    "SO(2) to C8": (lambda: restricted(lambda: gspaces.rot2dOnR2(-1), 8), 8, 4),
    **{f"{name} of images": (lambda name=name: fields.GSPACES[name], order, order) for name, order in (
        ("rot4", 4), ("flipRot4", 8), ("flipRot2", 4), ("flip", 2), ("flip_other_axis", 2), ("trivial", 1))},
}  # fmt: skip
GSPACES = {
    "octa": (gspaces.octaOnR3, 24, 24),
    "fullOcta": (gspaces.fullOctaOnR3, 48, 48),
    "ico": (gspaces.icoOnR3, 60, 12),
    "mirror": (gspaces.mirOnR3, 2, 2),
    "rot2d": (lambda: gspaces.rot2dOnR3(4), 4, 4),
    "rot2d, eight": (lambda: gspaces.rot2dOnR3(8), 8, 4),
    "rot2d about x": (lambda: turned([HALF, 0, 0, HALF]), 4, 4),
    "dihedral": (lambda: gspaces.dihedralOnR3(4), 8, 8),
    "conical": (lambda: gspaces.conicalOnR3(4), 8, 8),
    "fullCylindrical": (lambda: gspaces.fullCylindricalOnR3(4), 16, 16),
    "SO(3) to octa": (lambda: restricted(gspaces.rot3dOnR3, "octa"), 24, 24),
    "SO(3) to D4": (lambda: restricted(gspaces.rot3dOnR3, (True, 4)), 8, 8),
}


@functools.cache
def gspace_of(name):
    """Made once: escnn reads irreps from a file for seconds."""
    with contextlib.redirect_stdout(io.StringIO()):
        return (IMAGES | GSPACES)[name][0]()


@functools.cache
def lattice(gspace):
    """The elements that map voxels to voxels, with their indices."""
    group = group_from_gspace(gspace)
    return [(index, element) for index, element in enumerate(gspace.fibergroup.elements) if group.lattice[index]]
