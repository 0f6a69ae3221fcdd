"""Training with Lightning: what it measures, how it resumes, and what comes out."""

from __future__ import annotations

import csv
import dataclasses
import logging
import os
import pickle
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchmetrics import MeanMetric

from .loading import Batches, is_first_process
from .settings import Settings, SettingsError

Predict = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


class Learner(lightning.LightningModule):
    """Adam on a loss; the learning rate falls as half a cosine, with ``--warmup`` after one that rises (one cycle, in
    which the first beta goes from 0.95 to 0.85 and back, too), or (``constant``) stays. Measures ``metric``.

    Every epoch starts from a seed of its own, so a resumed run draws what an uninterrupted one would.
    """

    metric: str
    mode: str
    loss: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, model: nn.Module, predict: Predict, settings: Settings, constant: bool = False) -> None:
        super().__init__()
        if constant and settings.warmup:
            raise SettingsError(f"--warmup must be 0 where the learning rate is constant, got {settings.warmup}")
        self.model, self.predict, self.settings, self.constant = model, predict, settings, constant
        self.validation_mean, self.test_mean = MeanMetric(), MeanMetric()  # exact where shares differ in size

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(1_000_003 * self.settings.seed + self.current_epoch + 500_009 * self.global_rank)
        self.trainer.train_dataloader.set_epoch(self.current_epoch)

    def training_step(self, batch: Any, number: int) -> Tensor:
        out, target = self.predict(self.model, batch)
        loss = self.loss(out, target)
        self.log("loss", loss, prog_bar=True, batch_size=len(target), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def _measure(self, mean: MeanMetric, name: str, batch: Any) -> None:
        out, target = self.predict(self.model, batch)
        value = self.measure(out, target).nan_to_num(nan=torch.inf if self.mode == "min" else -torch.inf)
        mean.update(value, weight=len(target))  # which leaves NaN out without a word
        self.log(name, mean, prog_bar=True, batch_size=len(target))

    def validation_step(self, batch: Any, number: int) -> None:
        self._measure(self.validation_mean, self.metric, batch)

    def test_step(self, batch: Any, number: int) -> None:
        self._measure(self.test_mean, f"test_{self.metric}", batch)

    def configure_optimizers(self):
        settings = self.settings
        optimizer = torch.optim.Adam(self.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
        if self.constant:
            return optimizer
        schedules, steps = torch.optim.lr_scheduler, int(self.trainer.estimated_stepping_batches)
        if settings.warmup and steps > 4:
            rising = max(settings.warmup, 2 / steps)  # two steps at least, which torch's schedule needs
            schedule = schedules.OneCycleLR(optimizer, settings.learning_rate, steps, pct_start=rising)
        else:
            schedule = schedules.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Classifier(Learner):
    """Cross entropy, measured by accuracy in percent."""

    metric, mode, loss = "accuracy", "max", staticmethod(F.cross_entropy)

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        return 100 * (out.argmax(1) == target).float().mean()


class Regressor(Learner):
    """Mean squared error."""

    metric, mode, loss = "error", "min", staticmethod(F.mse_loss)

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)


class Timed(Learner):
    """Counts the processor's seconds in steps, through a resume."""

    seconds = 0.0

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        self.start = time.process_time()

    def on_train_batch_end(self, out: Any, batch: Any, number: int) -> None:
        self.seconds += time.process_time() - self.start

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = self.seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seconds = checkpoint["seconds"]


@dataclasses.dataclass
class Outcome:
    """What a run measured."""

    metric: str
    value: float
    parameters: int
    seconds: float
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointError(ValueError):
    """A file that is not a whole checkpoint."""


def load(path: Path, map_location: Any = "cpu") -> Any:
    """A checkpoint's tensors, numbers and texts, every byte checked against its checksum; runs no code.

    Raises:
        CheckpointError: naming the file, where it is cut short, damaged or holds anything else.
    """
    try:
        if damaged := zipfile.ZipFile(path).testzip():
            raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location, weights_only=True)
    except (ValueError, zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({reason}); delete it, or pass --again, to train from the start"
        ) from error


class Checkpoints(TorchCheckpointIO):
    """Renamed when whole: Lightning's come from the temporary folder, by copying where that is another disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, f"{path}.part", storage_options)
        os.replace(f"{path}.part", path)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        return load(Path(path), map_location)


class Best(ModelCheckpoint):
    """The best checkpoint, whose score is kept when the folder has moved too."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, here = state_dict["dirpath"], self.dirpath
        moved = {name: x.replace(before, here) if isinstance(x, str) else x for name, x in state_dict.items()}
        moved["best_k_models"] = {path.replace(before, here): score for path, score in moved["best_k_models"].items()}
        super().load_state_dict(moved)


class Stopping(EarlyStopping):
    """Early stopping that also keeps a run which had stopped, and was killed before its test, from training on."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.should_stop |= self.wait_count >= self.patience


def fit(learner: Learner, training: Batches, validation: Batches | None, testing: Batches, checks: int = 20) -> Outcome:
    """Train and test; with validation data, the weights of the best of about ``checks`` checks on them are tested.

    Resumes from the last epoch's checkpoint where the run's folder has one. The model keeps the tested weights, in eval
    mode.
    """
    settings, metric, mode = learner.settings, learner.metric, learner.mode
    if settings.again and is_first_process():
        shutil.rmtree(settings.folder, ignore_errors=True)
    options: dict[str, Any] = {"dirpath": settings.folder, "enable_version_counter": False}
    timer, every = Timer(), 1
    callbacks: list = [timer, ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **options)]
    if validation is not None:
        options |= {"monitor": metric, "mode": mode, "save_weights_only": True, "save_on_train_epoch_end": False}
        callbacks.insert(0, Best(filename="best", **options))  # the first is the one that Lightning tests
        every = next(n for n in range(max(1, settings.epochs // checks), 0, -1) if settings.epochs % n == 0)
        if settings.patience:
            callbacks.append(Stopping(metric, patience=settings.patience, mode=mode))
    elif settings.patience:
        raise SettingsError("--patience needs validation data, and this run has none")
    trainer = _trainer(settings, callbacks, log_every_n_steps=min(50, len(training)), check_val_every_n_epoch=every)
    trainer.fit(learner, training, validation, ckpt_path=None if settings.again else "last")
    best = "best" if validation is not None else None
    measured = trainer.test(learner, testing, ckpt_path=best, verbose=False)[0][f"test_{metric}"]
    learner.model.eval()
    more = {}
    if found := logged(settings, metric).values():
        more["validation"] = float(f"{max(found) if mode == 'max' else min(found):.7g}")
    return Outcome(metric, float(measured), parameters(learner.model), timer.time_elapsed("train"), more)


def _trainer(settings: Settings, callbacks: list, **options: Any) -> lightning.Trainer:
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    device, several = torch.device(settings.device), settings.devices > 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", settings.devices))  # torchrun's
    torchrun = torch.distributed.is_torchelastic_launched()
    return lightning.Trainer(
        default_root_dir=settings.folder,
        max_epochs=settings.epochs,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=here if device.index is None else [device.index],
        num_nodes=max(1, settings.devices // here),
        strategy=DDPStrategy(find_unused_parameters=True) if several else "auto",
        sync_batchnorm=several and device.type == "cuda",
        use_distributed_sampler=False,  # Batches share themselves
        precision=settings.precision,
        gradient_clip_val=settings.clip or None,
        callbacks=callbacks,
        plugins=[Checkpoints(), *([] if torchrun else [LightningEnvironment()])],  # whatever SLURM says
        logger=[CSVLogger(settings.folder, "csv"), TensorBoardLogger(settings.folder, "tensorboard")],
        enable_progress_bar=settings.progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def logged(settings: Settings, name: str) -> dict[int, float]:
    """A measure by epoch, from 0, from the logs of a run and of what it resumed."""
    curve = {}
    for path in sorted(settings.folder.glob("csv/version_*/metrics.csv"), key=lambda p: int(p.parent.name[8:])):
        with path.open() as file:
            curve |= {int(line["epoch"]): float(line[name]) for line in csv.DictReader(file) if line.get(name)}
    return curve


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def match_parameters(build: Callable[[int], nn.Module], wanted: int) -> nn.Module:
    """The model of the width whose number of parameters comes closest to what is wanted."""
    with torch.device("meta"):
        width = min(range(4, 513, 4), key=lambda channels: abs(parameters(build(channels)) - wanted))
    return build(width)
