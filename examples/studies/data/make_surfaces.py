"""Potentials on protein surfaces: makes the file that surfaces.py reads.

Needs the commands apbs (Debian's package apbs), pdb2pqr and pypulchra (PyPI's packages of these names), and takes some
5 seconds for each protein. Structures are C-alpha traces, whose other atoms pulchra builds; make_chains.py makes their
file. Stored rows of results also have chains with all atoms, from .pdb.gz files; without ``--pdb`` the sets differ.

    python examples/studies/data/make_surfaces.py surfaces.npz --traces chains.npz

AMBER charges; linear Poisson-Boltzmann equation without salt; dielectric constants 4 and 78.54. The potential of a
residue (kT/e) is the mean over the grid points 3.2 to 5 angstroms from their nearest atom that have this atom in the
residue; NaN if there are fewer than 8. Clusters of sequences are split into sets; both partners of complexes, in their
bound positions, are of test clusters.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from proteins import Protein, load, split
from scipy.spatial import cKDTree

KINDS = re.findall("...", "ALAARGASNASPCYSGLNGLUGLYHISILELEULYSMETPHEPROSERTHRTRPTYRVAL")
SAME = {"HID": "HIS", "HIE": "HIS", "HIP": "HIS", "CYX": "CYS", "CYM": "CYS", "ASH": "ASP", "GLH": "GLU", "LYN": "LYS"}
SEED, SHARES = 3, (0.1, 0.45)
SETS = {  # rebuilt proteins of each set, and their residues
    "complexes": (12, 80, 500), "larger": (20, 251, 450), "chains": (40, 40, 250), "validation": (20, 40, 250),
    "training": (999, 40, 250),  # all
}  # fmt: skip
APBS = """read
    mol pqr x.pqr
end
elec
    mg-auto
    dime {}
    cglen {}
    fglen {}
    cgcent mol 1
    fgcent mol 1
    mol 1
    lpbe
    bcfl sdh
    ion charge 1 conc 0.0 radius 2.0
    ion charge -1 conc 0.0 radius 2.0
    pdie 4.0
    sdie 78.54
    srfm smol
    chgm spl2
    sdens 10.0
    srad 1.4
    swin 0.3
    temp 298.15
    calcenergy no
    calcforce no
    write pot dx x
end
quit
"""


def run(folder: Path, *words: str) -> None:
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=900)


def atoms(pdb: str) -> list[str]:
    """Lines of atoms, without alternatives."""
    return [line for line in pdb.splitlines() if line.startswith("ATOM") and line[16] in " A"]


def rebuilt(protein: Protein, folder: Path) -> str:
    """All atoms but hydrogen of a trace, in PDB format; pieces without gaps are built one by one."""
    piece, lines = torch.cat([torch.zeros(1), (~protein.follows).cumsum(0)]), []
    centre = protein.pos.mean(0)  # columns of large numbers would touch, and APBS would not read them
    for n in piece.unique():
        part = protein.part(piece == n)
        places = torch.arange(len(protein))[piece == n].tolist()
        text = "".join(
            f"ATOM  {k + 1:5d}  CA  {KINDS[kind]} {chr(65 + int(part.chain[0]))}{k + 1:4d}    "
            f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00\n"
            for k, kind, (x, y, z) in zip(places, part.residue.tolist(), (part.pos - centre).tolist(), strict=True)
        )
        (folder / "trace.pdb").write_text(text)
        run(folder, "pypulchra", "-i", "trace.pdb", "-o", "all.pdb")
        lines += atoms((folder / "all.pdb").read_text())
    return "\n".join(lines)


def labelled(pdb: str, folder: Path) -> dict[str, np.ndarray]:
    """Residues of a structure: kind, chain, C-alpha position, centre of the atoms, charge and potential."""
    (folder / "x.pdb").write_text(pdb)
    run(folder, "pdb2pqr", "--ff=AMBER", "--keep-chain", "--drop-water", "x.pdb", "x.pqr")
    lines = atoms((folder / "x.pqr").read_text())
    pos = np.array([[line[n : n + 8] for n in (30, 38, 46)] for line in lines], float)  # columns may touch
    charge = np.array([line[54:].split()[0] for line in lines], float)
    starts = np.array([n == 0 or lines[n][21:27] != lines[n - 1][21:27] for n in range(len(lines))])
    residue, first = starts.cumsum() - 1, [line for line, new in zip(lines, starts, strict=True) if new]
    total, span = len(first), np.ptp(pos, axis=0)
    counts = np.clip(np.ceil(((span + 24) / 0.9 - 1) / 32) * 32 + 1, 65, 193).astype(int)
    boxes = counts, (1.7 * span + 24).round(2), (span + 24).round(2)
    (folder / "x.in").write_text(APBS.format(*(" ".join(map(str, box)) for box in boxes)))
    run(folder, "apbs", "x.in")
    head, _, body = next(folder.glob("*.dx")).read_text().partition("data follows")
    shape, origin, *steps = (
        line.split()[-3:] for line in re.findall(r"^(?:.*1 class gridp|origin|delta).*", head, re.M)
    )
    axes = [float(origin[n]) + float(steps[n][n]) * np.arange(int(shape[n])) for n in range(3)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    values = np.array(body.partition("attribute")[0].split(), float)
    distance, nearest = cKDTree(pos).query(grid, distance_upper_bound=5.0)
    shell = (distance > 3.2) & (distance < 5.0)
    near = residue[nearest[shell]]
    points = np.bincount(near, minlength=total)
    alpha = {residue[n]: pos[n] for n, line in enumerate(lines) if line[12:16].strip() == "CA"}
    with np.errstate(invalid="ignore"):
        potential = np.bincount(near, values[shell], total) / np.where(points < 8, np.nan, points)
    centre = np.stack([np.bincount(residue, x) for x in pos.T], 1) / np.bincount(residue)[:, None]
    return {
        "residue": np.array([KINDS.index(SAME.get(line[17:20], line[17:20])) for line in first]),
        "chain": np.unique([line[21] for line in first], return_inverse=True)[1],
        "alpha": np.stack([alpha[n] for n in range(total)]), "centre": centre,
        "charge": np.bincount(residue, charge), "potential": potential,
    }  # fmt: skip


def read_chain(path: Path) -> tuple[Protein, str]:
    """The sequence of a .pdb.gz file, for clusters, and its atoms."""
    lines = atoms(gzip.decompress(path.read_bytes()).decode())
    kinds = [KINDS.index(line[17:20]) for line in lines if line[12:16].strip() == "CA" and line[17:20] in KINDS]
    zero = torch.zeros(len(kinds), dtype=torch.int64)
    protein = Protein(path.name.split(".")[0], torch.tensor(kinds), zero, zero, torch.zeros(len(kinds), 3))
    return protein, "\n".join(lines)


def complexes(path: Path, traces: list[Protein], test: list[Protein]) -> list[Protein]:
    """Both partners in their bound positions, if both are of test clusters."""
    with np.load(path) as file:
        places = torch.tensor(file["bound"]).split(np.diff(file["start"]).tolist())
    bound = {p.name: (p, x) for p, x in zip(traces, places, strict=True) if any(p is q for q in test)}
    found = []
    for name in sorted(name[:-2] for name in bound if name.endswith("_l") and name[:-1] + "r" in bound):
        parts = []
        for side in ("l", "r"):
            protein, x = bound[f"{name}_{side}"]
            part = dataclasses.replace(protein, pos=x / 1000.0).part(x[:, 0] > -(10**8))
            parts.append(dataclasses.replace(part, chain=part.chain + 10 * (side == "r")))
        names = (f.name for f in dataclasses.fields(Protein) if f.name != "name")
        found.append(Protein(name, **{f: torch.cat([getattr(part, f) for part in parts]) for f in names}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--pdb", type=Path, help="folder of .pdb.gz files of chains with all atoms")
    given = parser.parse_args()
    traces, pdb = load(given.traces), {}
    for path in sorted(given.pdb.glob("*.pdb.gz")) if given.pdb else ():
        protein, text = read_chain(path)
        pdb[protein.name] = protein, text
    parts = dict(
        zip(
            ("training", "validation", "test"),
            split([*traces, *(p for p, _ in pdb.values())], SEED, SHARES),
            strict=True,
        )
    )
    work = []
    for name, (count, low, high) in SETS.items():
        part = parts.get(name, parts["test"])
        if name == "complexes":
            part = complexes(given.traces, traces, part)
        elif name != "larger":
            work += [(name, p, pdb[p.name][1]) for p in part if p.name in pdb]
        gaps = name in ("complexes", "training")
        part = [p for p in part if p.name not in pdb and low <= len(p) <= high and (gaps or p.whole)]
        chosen = np.random.default_rng(SEED).permutation(len(part))[:count]
        work += [(name, part[n], None) for n in sorted(chosen)]
    folder, rows = given.out.with_suffix(""), []
    folder.mkdir(exist_ok=True)
    for number, (name, protein, text) in enumerate(work):
        path = folder / f"{protein.name}.npz"
        try:
            if not path.is_file():
                with tempfile.TemporaryDirectory() as place:
                    np.savez(path, **labelled(text or rebuilt(protein, Path(place)), Path(place)))
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            print(f"{protein.name} is left out: {error}", flush=True)
            continue
        rows.append((name, protein.name, text is None, dict(np.load(path))))
        print(
            f"{number + 1} of {len(work)}: {protein.name}, {name}, {len(rows[-1][3]['residue'])} residues", flush=True
        )
    sets, names, built, arrays = zip(*rows, strict=True)
    joined = {key: np.concatenate([x[key] for x in arrays]) for key in arrays[0]}
    start = np.cumsum([0, *(len(x["residue"]) for x in arrays)])
    np.savez_compressed(given.out, start=start, name=names, set=sets, rebuilt=built, **joined)


if __name__ == "__main__":
    main()
