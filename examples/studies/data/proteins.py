"""C-alpha traces of proteins: read, synthetic, split by sequence; the elastic network that answers a push, and the drag
of a flow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BOND = 4.5  # angstroms; consecutive C-alpha atoms of a whole chain are 3.8 apart
BEAD = 4.2  # angstroms; radius of the bead that stands for a residue in a flow
WORD, SHARE = 5, 0.02  # length of the words that homologues share, and the share of the shorter sequence's words


@dataclasses.dataclass(frozen=True, eq=False)
class Protein:
    """One or more chains; lengths in angstroms.

    ``residue`` (N,) are types from 0 to 19, ``index`` (N,) residue numbers, strictly increasing within a chain,
    ``chain`` (N,) numbers from 0 on.
    """

    name: str
    residue: Tensor
    index: Tensor
    chain: Tensor
    pos: Tensor

    def __len__(self) -> int:
        return len(self.residue)

    def part(self, where: Tensor | slice) -> Protein:
        """Some of the residues."""
        tensors = {f.name: getattr(self, f.name)[where] for f in dataclasses.fields(self) if f.name != "name"}
        return Protein(self.name, **tensors)

    @property
    def follows(self) -> Tensor:
        """Whether each residue but the first is bonded to the one before it, (N - 1,)."""
        return (self.chain.diff() == 0) & (self.pos.diff(dim=0).norm(dim=1) < BOND)

    @property
    def whole(self) -> bool:
        """One chain, nothing missing within it."""
        return bool(self.follows.all())


def load(path: Path) -> list[Protein]:
    """The proteins of an .npz file.

    ``start`` has the first residue of each protein and the number of all residues, ``name`` the names; per residue
    there are ``residue``, ``number``, ``chain`` and ``unbound`` in thousandths of an angstrom.

    Raises:
        FileNotFoundError: where there is no such file.
        ValueError: for a file without these arrays.
    """
    with np.load(path) as file:
        missing = {"start", "name", "residue", "number", "chain", "unbound"} - set(file)
        if missing:
            raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}")
        arrays = {name: file[name] for name in file}
    every = {
        "residue": torch.tensor(arrays["residue"], dtype=torch.int64),
        "index": torch.tensor(arrays["number"], dtype=torch.int64),
        "chain": torch.tensor(arrays["chain"], dtype=torch.int64),
        "pos": torch.tensor(arrays["unbound"] / 1000.0, dtype=torch.float64),
    }
    ends = zip(arrays["name"], arrays["start"], arrays["start"][1:], strict=False)
    return [Protein(str(name), **{key: x[a:b] for key, x in every.items()}) for name, a, b in ends]


def synthetic(count: int, fewest: int, most: int, seed: int, chains: int = 1) -> list[Protein]:
    """Random compact chains: walks of bonds of 3.8 angstroms that keep their direction and turn back to the middle."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        parts = []
        for chain in range(chains):
            size = int(random.integers(fewest, most + 1))
            pos, step = np.zeros((size, 3)), random.normal(size=3)
            radius = 2.5 * size ** (1 / 3)
            for n in range(1, size):
                step = 0.6 * step / np.linalg.norm(step) + 0.4 * random.normal(size=3) - 0.3 * pos[n - 1] / radius
                pos[n] = pos[n - 1] + 3.8 * step / np.linalg.norm(step)
            pos += np.array([2 * radius * chain, 0, 0])
            parts.append(pos)
        sizes = torch.tensor([len(part) for part in parts])
        found.append(Protein(
            f"{number}", torch.tensor(random.integers(0, 20, int(sizes.sum()))),
            torch.cat([torch.arange(n) for n in sizes.tolist()]), torch.arange(chains).repeat_interleave(sizes),
            torch.tensor(np.concatenate(parts)),
        ))  # fmt: skip
    return found


def words(protein: Protein) -> set[int]:
    """The words of ``WORD`` residue types along the chains, as numbers; missing residues are not looked at."""
    n = len(protein) - WORD + 1
    if n < 1:
        return set()
    number = sum(protein.residue[k : n + k] * 20**k for k in range(WORD))
    return set(number[protein.chain[:n] == protein.chain[WORD - 1 :]].tolist())


def clusters(proteins: list[Protein]) -> list[int]:
    """A cluster's number for each protein, by single linkage: two are linked that share at least two words, and at
    least ``SHARE`` of the words of the shorter.

    Unrelated sequences of 200 residues share 0.01 words of five; the smallest share of a whole chain of 500 is ten.
    """
    found = [words(protein) for protein in proteins]
    label = list(range(len(proteins)))
    for a in range(len(proteins)):
        for b in range(a):
            shared = len(found[a] & found[b])
            if label[a] != label[b] and shared >= max(2, SHARE * min(len(found[a]), len(found[b]))):
                old, new = label[a], label[b]
                label = [new if x == old else x for x in label]
    return label


def split(proteins: list[Protein], seed: int, shares: tuple[float, float] = (0.1, 0.2)) -> list[list[Protein]]:
    """Proteins to train, validate and test on, no cluster in two of them; the largest clusters go to training.

    ``shares`` of the clusters validate and test.
    """
    label = np.array(clusters(proteins))
    names, sizes = np.unique(label, return_counts=True)
    names = np.random.default_rng(seed).permutation(names[sizes < max(3, 0.03 * len(proteins))])
    counts = [max(1, round(share * len(names))) for share in shares]
    held_out = names[: counts[0]], names[counts[0] : sum(counts)]
    found: list[list[Protein]] = [[], [], []]
    for protein, cluster in zip(proteins, label, strict=True):
        place = 1 if cluster in held_out[0] else 2 if cluster in held_out[1] else 0
        found[place].append(protein)
    return found


def stiffness(pos: Tensor) -> Tensor:
    """The matrix (3 N, 3 N) of an elastic network whose springs between all pairs have stiffness 100 / distance^2.

    Source: L. Yang, G. Song, R. L. Jernigan, Protein elastic network models and the ranges of cooperativity (2009).
    """
    count = len(pos)
    offset = pos[:, None] - pos
    square = offset.square().sum(2).fill_diagonal_(1)
    blocks = -(100 / square.square().fill_diagonal_(torch.inf))[..., None, None] * (
        offset[..., None] * offset[..., None, :]
    )
    own = torch.arange(count)
    blocks[own, own] = -blocks.sum(1)
    return blocks.transpose(1, 2).reshape(3 * count, 3 * count)


def rigid_motions(pos: Tensor) -> Tensor:
    """An orthonormal basis (3 N, 6) of translations and rotations."""
    eye = torch.eye(3, dtype=pos.dtype)
    centred = pos - pos.mean(0)
    turns = torch.linalg.cross(eye[:, None].expand(3, len(pos), 3), centred.expand(3, -1, -1), dim=2)
    moves = eye[:, None].expand(3, len(pos), 3)
    return torch.linalg.qr(torch.cat([moves, turns]).flatten(1).T)[0]


def response(pos: Tensor) -> Tensor:
    """Displacements by forces: the pseudo-inverse of :func:`stiffness`, (N, 3, N, 3)."""
    matrix, rigid = stiffness(pos), rigid_motions(pos)
    scale = matrix.diagonal().mean()
    inverse = torch.linalg.inv(matrix + scale * rigid @ rigid.T) - rigid @ rigid.T / scale
    return inverse.unflatten(0, (-1, 3)).unflatten(2, (-1, 3))


def mobility(pos: Tensor) -> Tensor:
    """Velocities of equal beads by forces on them (3 N, 3 N), in units of the mobility of one bead.

    Source: J. Rotne, S. Prager, Variational treatment of hydrodynamic interaction in polymers (1969), with the form for
    beads that overlap.
    """
    count, eye = len(pos), torch.eye(3, dtype=pos.dtype)
    offset = pos[:, None] - pos
    r = offset.norm(dim=2).fill_diagonal_(1)[..., None, None] / BEAD
    along = (offset[..., None] * offset[..., None, :]) / (r * BEAD).square()
    apart = 3 / (4 * r) * ((1 + 2 / (3 * r**2)) * eye + (1 - 2 / r**2) * along)
    overlapping = (1 - 9 * r / 32) * eye + 3 * r / 32 * along
    blocks = torch.where(r > 2, apart, overlapping)
    own = torch.arange(count)
    blocks[own, own] = eye
    return blocks.transpose(1, 2).reshape(3 * count, 3 * count)


def drag(pos: Tensor) -> Tensor:
    """Forces on the residues of a rigid protein that moves with unit velocity along each axis, (N, 3, 3)."""
    moves = torch.eye(3, dtype=pos.dtype).repeat(len(pos), 1)
    return torch.linalg.solve(mobility(pos), moves).unflatten(0, (-1, 3))
