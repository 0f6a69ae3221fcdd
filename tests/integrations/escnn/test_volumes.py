"""Images and volumes: every discrete gspace, with escnn's own transform as the judge."""

import numpy as np
import pytest
import torch
from fields import field, regular, trivial
from tg_equiattn.integrations.escnn import (
    group_from_gspace,
)
from volumes import GSPACES, IMAGES, gspace_of, lattice

from tg_equiattn.groups import FiniteGroup
from tg_equiattn.testing import act

LARGE = {name for name, (_, order, _) in GSPACES.items() if order > 24}
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in GSPACES]


def moved(group, x, index):
    """The exact action of the core on escnn's layout."""
    fields = x.tensor.unflatten(1, (len(x.type), -1))
    return act(fields, group, index).flatten(1, 2) if fields.shape[2] > 1 else act(x.tensor, group, index)


def worst(group, gspace, *shape):
    """The largest difference between the core's action and escnn's, over trivial and regular fields."""
    errors = []
    for field_type in (trivial(gspace, 2), regular(gspace, 2)):
        x = field(field_type, 1, *shape)
        for index, element in lattice(gspace):
            got, wanted = moved(group, x, index), x.transform(element).tensor
            assert got.shape == wanted.shape  # quarter turns exchange sides
            errors.append(float((got - wanted).abs().max()))
    return max(errors)


@pytest.mark.parametrize("name", [*IMAGES, *EVERY])
def test_the_action_is_that_of_escnns_transform(name):
    """For every lattice element of every gspace; products and the regular representation, too."""
    gspace, (_, order, exact) = gspace_of(name), (IMAGES | GSPACES)[name]
    group, elements, dim = group_from_gspace(gspace), gspace.fibergroup.elements, gspace.dimensionality
    assert (len(group), group.dim, len(lattice(gspace))) == (order, dim, exact)
    for shape in ((4, 4, 4), (3, 4, 5)) if order <= 24 else ((3, 2, 3),):
        assert worst(group, gspace, *shape[:dim]) < 1e-12
    for a in torch.randint(order, (min(order, 10),)).tolist():
        permutation = torch.eye(order)[group.cayley[group.inverse[a]]]
        np.testing.assert_allclose(gspace.regular_repr(elements[a]), permutation, atol=1e-12)
        for b in torch.randint(order, (min(order, 5),)).tolist():
            assert elements[int(group.cayley[a, b])] == elements[a] @ elements[b]


@pytest.mark.parametrize("name", ["octa", "rot2d about x", "rot2d", "dihedral"])
def test_without_the_change_of_axes_it_is_not(name):
    """Negative control: escnn's matrices as they are. They are ours where no element mixes z with other axes."""
    gspace = gspace_of(name)
    as_they_are = FiniteGroup(np.stack([gspace.basespace_action(e) for e in gspace.fibergroup.elements]))
    error = worst(as_they_are, gspace, 4, 4, 4)
    assert error < 1e-12 if name in ("rot2d", "dihedral") else error > 0.1
