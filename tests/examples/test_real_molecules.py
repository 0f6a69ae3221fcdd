"""Published sets are read as they were written, and refused by name; computed ones are what tblite says."""

import numpy as np
import pytest
import torch
from data.published_molecules import SETS, Molecule, load
from real_molecules import RealMoleculesStudy, Units, build, molecules


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="--data must be the folder of the files of AcAc, got none"):
        molecules(RealMoleculesStudy(sets=("AcAc",)))
    for name in SETS:
        with pytest.raises(FileNotFoundError, match=f"is missing. {name}: "):
            load(tmp_path, name)


def test_mace():
    """With and without attention: forces are slopes, and atoms far apart know of each other with it alone."""
    pytest.importorskip("mace")
    from baselines.molecular_potentials import batch_of

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    far = np.array([[0, 0, 0], [1.0, 0, 0], [0, 8.0, 0], [0, 8.0, 1.0]])
    shapes = [far + 0.2 * random.normal(size=(4, 3)) for _ in range(3)]
    systems = [Molecule(np.array([1, 6, 8, 1]), x, 1.0, random.normal(size=(4, 3)), {}, None) for x in shapes]
    units = Units.of(systems)
    for run in RealMoleculesStudy(sets=("cumulenes",), data="anywhere", kernels=(1, 1, 1)).runs():
        graphs = [units.graph(molecule, run.cutoff) for molecule in systems]
        model = build(run, graphs, units).eval()
        forces = model(batch_of(graphs)).detach()[:4, 1:]
        steps = 0.02 * torch.tensor([[[0, 0, 0]] * 2 + [[0, n, 0]] * 2 for n in (-1.0, 1.0)])
        moved = [dict(graphs[0], positions=graphs[0]["positions"] + step) for step in steps]
        less, more = (2 * float(model(batch_of([graph]))[0, 0].detach()) for graph in moved)
        total = float(forces[2:, 1].sum())  # of the pair that moved
        assert total == pytest.approx((less - more) / 0.04, abs=0.02 * float(forces.abs().max()))
        assert (abs(total) > 1e-4) == (run.models == ("with",))
