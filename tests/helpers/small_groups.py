"""The finite groups that tests run over."""

from tg_equiattn.groups import cyclic, dihedral, mirror, octahedral, trivial

PLANAR = {"C2": cyclic(2), "C4": cyclic(4), "C8": cyclic(8), "D2": dihedral(2), "D4": dihedral(4), "mirror": mirror()}
GROUPS = {**PLANAR, "octahedral": octahedral(), "trivial": trivial()}
