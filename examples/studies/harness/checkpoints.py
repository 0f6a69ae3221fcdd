"""Checkpoints that are whole or not there, and that run no code when they are loaded."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO


class CheckpointError(ValueError):
    """A file that is not a whole checkpoint."""


def save(content: Any, path: Path) -> None:
    """Write to a file beside it, then rename: what was there before stays until all is on the disk.

    Raises:
        OSError: naming the file, when the disk is full; no part of a file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # one name, so that what a kill left goes with the next
    try:
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch's writer wraps the error of the system
        raise OSError(f"{path} could not be written ({error}); what was there before is untouched") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def load(path: Path, map_location: Any = "cpu") -> Any:
    """Read tensors, numbers, strings and containers of them, every byte checked against its checksum.

    Raises:
        CheckpointError: naming the file, where it is cut short, damaged or holds anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except (ValueError, zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({reason}); delete it, or pass --again, to train from the start"
        ) from error


class SafeCheckpointIO(TorchCheckpointIO):
    """``save`` and ``load`` for Lightning."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        return load(Path(path), map_location)
