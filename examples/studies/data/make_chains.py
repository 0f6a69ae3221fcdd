"""C-alpha traces of proteins: makes the file that proteins.py and make_surfaces.py read. Needs numpy alone.

The structures are docking benchmark 5 as cleaned by the HADDOCK group (Apache-2.0; coordinates of the PDB):

    git clone --depth 1 https://github.com/haddocking/BM5-clean
    python examples/studies/data/make_chains.py BM5-clean chains.npz

Each complex has two partners (r, l), each in an unbound form (u), which is superposed on the bound one (b-matched).
Residues are those of the unbound form with a C-alpha atom. Positions are in thousandths of an angstrom. The source
joins the chains of a partner: a new one is assumed where neighbors in the list are more than 20 angstroms apart, or
where their numbers differ by 100 or more and they are more than 6 apart.

Stored rows of results have 462 proteins: 443 of them are equal in this file, and the others are missing or differ in
some residues.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

KINDS = re.findall("...", "ALAARGASNASPCYSGLNGLUGLYHISILELEULYSMETPHEPROSERTHRTRPTYRVAL")
MISSING = -(2**31)


def residues(path: Path) -> dict[int, tuple[int, np.ndarray, float]]:
    """Kind, C-alpha atom and B-factor by residue number, the first conformer of each, in the order of the file."""
    found: dict[int, tuple[int, np.ndarray, float]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("ATOM") and line[12:16].strip() == "CA" and line[17:20] in KINDS and line[16] in " A":
            pos = np.array([float(line[start : start + 8]) for start in (30, 38, 46)])
            found.setdefault(int(line[22:26]), (KINDS.index(line[17:20]), pos, float(line[60:66])))
    return found


def partner(prefix: Path) -> dict[str, np.ndarray]:
    """The arrays of a partner, from its two files."""
    unbound, bound = (residues(Path(f"{prefix}_{form}.pdb")) for form in ("u", "b-matched"))
    number = np.array(sorted(unbound))
    both = np.array([n in bound for n in number])
    pos = np.array([unbound[n][1] for n in number])
    target = np.array([bound[n][1] if n in bound else np.full(3, np.nan) for n in number])
    apart, steps = np.linalg.norm(np.diff(pos, axis=0), axis=1), np.diff(number)
    new = (apart > 20) | ((steps >= 100) & (apart > 6))
    return {
        "residue": np.array([unbound[n][0] for n in number], np.int8), "number": number.astype(np.int32),
        "chain": np.concatenate([[0], new.cumsum()]).astype(np.int8), "unbound": np.rint(1000 * pos).astype(np.int32),
        "bound": np.where(both[:, None], np.rint(1000 * np.nan_to_num(target)), MISSING).astype(np.int32),
        "b_factor": np.rint([100 * unbound[n][2] for n in number]).astype(np.int32),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    names, parts = [], []
    for folder in sorted((options.clone / "HADDOCK-ready").iterdir()):
        for name in (f"{folder.name[:4]}_{side}" for side in "lr"):
            prefix = folder / f"{folder.name}{name[4:]}"
            if Path(f"{prefix}_u.pdb").is_file():
                names.append(name)
                parts.append(partner(prefix))
    start = np.cumsum([0, *(len(part["residue"]) for part in parts)])
    every = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    np.savez_compressed(options.out, name=np.array(names), start=start, **every)
    print(f"{options.out}: {len(names)} proteins of {start[-1]:,} residues")


if __name__ == "__main__":
    main()
