"""PET of metatrain (github.com/metatensor/metatrain, BSD-3-Clause), alone or with its long range."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ase.io
import numpy as np
import torch
from harness.settings import Settings, SettingsError

if TYPE_CHECKING:
    from ase import Atoms

SIZE = {
    "d_pet": 64, "d_head": 64, "d_node": 128, "d_feedforward": 128, "num_heads": 4, "num_attention_layers": 1,
}  # fmt: skip


class PET:
    """PET trained by metatrain, at its defaults but for the size, the cutoff, the rate, the epochs and the batch.

    Args:
        settings: of a single run of a study. The model ``PET+long`` has ``long_range``.
        frames: to train on, with ``REF_energy`` and ``REF_forces``.
        validation: frames by which metatrain chooses the epoch.
    """

    def __init__(self, settings: Any, frames: Sequence[Atoms], validation: Sequence[Atoms]) -> None:
        self.settings, self.parts = settings, {"training_set": frames, "validation_set": validation}

    def fit(self) -> None:
        """Train, in the folder of the run."""
        try:
            from metatomic_ase import MetatomicCalculator
            from metatrain.cli.train import train_model
            from omegaconf import OmegaConf
        except ImportError as error:
            raise SettingsError(f"--models PET needs metatrain: pip install metatrain torch-pme ({error})") from error
        settings: Settings = self.settings
        folder = settings.folder.absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options: dict[str, Any] = {"device": settings.device, "seed": settings.seed, "final_eval": False, "test_set": 0}
        for part, frames in self.parts.items():
            ase.io.write(folder / f"{part}.xyz", frames)
            labels = {"key": "REF_energy", "unit": "eV", "forces": {"key": "REF_forces"}, "stress": False}
            systems = {"read_from": str(folder / f"{part}.xyz"), "length_unit": "angstrom"}
            options[part] = {"systems": systems, "targets": {"energy": labels}}
        (name,) = self.settings.models
        model = SIZE | {"cutoff": self.settings.cutoff, "long_range": {"enable": name == "PET+long"}}
        training = {"num_epochs": settings.epochs, "batch_size": settings.batch, "num_workers": 0}
        training["learning_rate"] = settings.learning_rate
        options["architecture"] = {"name": "pet", "model": model, "training": training}
        train_model(OmegaConf.create(options), folder / "model.pt", folder / "extensions", folder)
        self.calculator = MetatomicCalculator(folder / "model.pt", device=settings.device)
        self.model: torch.nn.Module = self.calculator.model()

    def predictions(self, systems: Sequence[Atoms]) -> tuple[np.ndarray, np.ndarray]:
        """Energies, and forces on the atoms of all systems."""
        found = [self.calculator.compute_energy(atoms, compute_forces_and_stresses=True) for atoms in systems]
        return np.array([one["energy"] for one in found]), np.concatenate([one["forces"] for one in found], dtype=float)
