"""Published sets are read as they were written, and refused by name; computed ones are what tblite says."""

import numpy as np
import pytest
import torch
from data.published_molecules import SETS, Molecule, load, read_xyz
from real_molecules import RealMoleculesStudy, Units, build, molecules

HEADER = "Properties=species:S:1:pos:R:3:forces:R:3 nC=1 config_type=in-domain energy=-3.5"
LATTICE = ' Lattice="9 0 0 0 9 0 0 0 9" pbc='
ATOMS = "C 0.0 0.5 1.0 0.1 0.2 0.3", "Cl 1.0 0.0 0.0 -0.1 -0.2 -0.3"


def write(path, *headers, atoms=ATOMS):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for header in headers for line in (str(len(atoms)), header, *atoms)]
    path.write_text("\n".join(lines) + "\n")


def test_extended_xyz(tmp_path):
    write(tmp_path / "some.xyz", HEADER + LATTICE + '"F F F"', HEADER + LATTICE + '"T T T"')
    first, second = read_xyz(tmp_path / "some.xyz")
    assert first.numbers.tolist() == [6, 17]
    assert first.pos.tolist() == [[0, 0.5, 1], [1, 0, 0]]
    assert first.forces.tolist() == [[0.1, 0.2, 0.3], [-0.1, -0.2, -0.3]]
    assert first.energy == -3.5
    assert first.info["nC"] == "1"
    assert first.cell is None
    assert second.cell.tolist() == (9 * np.eye(3)).tolist()
    for text in ("two\n", "2\nnothing\nC 0 0 0\n", f"2\n{HEADER}\nC 0 0 0\nC 1 0 0\n", f"2\n{HEADER}\n{ATOMS[0]}\n"):
        (tmp_path / "damaged.xyz").write_text(text)
        with pytest.raises(ValueError, match=r"damaged\.xyz must be extended XYZ"):
            read_xyz(tmp_path / "damaged.xyz")


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
