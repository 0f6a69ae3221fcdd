"""Training with Lightning: logs, checkpoints, resuming, early stopping, mixed precision, several processes."""

from __future__ import annotations

import csv
import dataclasses
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchmetrics import MeanMetric

from .checkpoints import SafeCheckpointIO, load
from .devices import is_cuda
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

    def __init__(self, model: nn.Module, predict: Predict, settings: Settings, constant: bool = False) -> None:
        super().__init__()
        if constant and settings.warmup:
            raise SettingsError(f"--warmup must be 0 where the learning rate is constant, got {settings.warmup}")
        self.model, self.predict, self.settings, self.constant = model, predict, settings, constant
        self.validation_mean, self.test_mean = MeanMetric(), MeanMetric()  # exact where shares differ in size

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

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

    metric, mode = "accuracy", "max"

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def measure(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 100 * (logits.argmax(1) == labels).float().mean()


class Regressor(Learner):
    """Mean squared error."""

    metric, mode = "error", "min"

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)

    measure = loss


@dataclasses.dataclass
class Outcome:
    """What a run measured."""

    metric: str
    value: float
    parameters: int
    seconds: float
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


class Best(ModelCheckpoint):
    """The best checkpoint, whose score is kept when the folder has moved too."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        def here(path: str) -> str:
            return str(Path(self.dirpath, Path(path).name)) if path else path

        paths = {name: here(state_dict[name]) for name in state_dict if name.endswith("model_path")}
        models = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict(state_dict | paths | {"dirpath": self.dirpath, "best_k_models": models})


class Stopping(EarlyStopping):
    """Early stopping that also keeps a run which had stopped, and was killed before its test, from training on."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.wait_count >= self.patience:
            trainer.should_stop = True


class Curve(lightning.Callback):
    """Validation measures by epoch, kept through a resume."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.points.append([trainer.current_epoch + 1, float(trainer.callback_metrics[module.metric])])

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]


def fit(learner: Learner, training: Batches, validation: Batches | None, testing: Batches, checks: int = 20) -> Outcome:
    """Train and test; with validation data, the weights of the best of about ``checks`` checks on them are tested.

    Resumes from the last epoch's checkpoint where the run's folder has one. The model keeps the tested weights, in eval
    mode.
    """
    settings = learner.settings
    folder = settings.folder
    last = folder / "last.ckpt"
    resume = str(last) if last.is_file() and not settings.again else None
    if settings.again and is_first_process():
        shutil.rmtree(folder, ignore_errors=True)
    options = {"dirpath": folder, "enable_version_counter": False}
    curve, timer = Curve(), Timer()
    callbacks: list[lightning.Callback] = [curve, timer]
    callbacks.append(ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **options))
    if validation is not None:
        callbacks.append(
            Best(
                filename="best", monitor=learner.metric, mode=learner.mode, save_weights_only=True,
                save_on_train_epoch_end=False, **options,  # before "last", which keeps what the best was
            )
        )  # fmt: skip
        if settings.patience:
            callbacks.append(Stopping(learner.metric, patience=settings.patience, mode=learner.mode))
    elif settings.patience:
        raise SettingsError("--patience needs validation data, and this run has none")
    every = max(1, settings.epochs // checks)
    while settings.epochs % every:  # so that the last epoch is checked
        every -= 1
    trainer = _trainer(settings, callbacks, min(50, len(training)), every if validation is not None else None)
    trainer.fit(learner, training, validation, ckpt_path=resume)
    if validation is not None:
        learner.load_state_dict(load(folder / "best.ckpt")["state_dict"])
    measured = trainer.test(learner, testing, verbose=False)[0][f"test_{learner.metric}"]
    learner.model.eval()
    return Outcome(
        learner.metric, float(measured), parameters(learner.model), timer.time_elapsed("train"), {"curve": curve.points}
    )


def _processes(settings: Settings) -> tuple[int, int]:
    """Processes on this machine, and machines, which torchrun knows."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", settings.devices))
    return here, max(1, settings.devices // here)


def _trainer(settings: Settings, callbacks: list, log_every: int, check_every: int | None) -> lightning.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    here, machines = _processes(settings)
    index = torch.device(settings.device).index
    several, torchrun = here * machines > 1, torch.distributed.is_torchelastic_launched()
    return lightning.Trainer(
        default_root_dir=settings.folder,
        max_epochs=settings.epochs,
        accelerator="gpu" if is_cuda(settings.device) else "cpu",
        devices=here if index is None else [index],
        num_nodes=machines,
        strategy=DDPStrategy(find_unused_parameters=True) if several else "auto",
        sync_batchnorm=several and is_cuda(settings.device),
        use_distributed_sampler=False,
        precision=settings.precision,
        gradient_clip_val=settings.clip or None,
        callbacks=callbacks,
        plugins=[SafeCheckpointIO(), *([] if torchrun else [LightningEnvironment()])],  # whatever SLURM says
        logger=[CSVLogger(settings.folder, "csv"), TensorBoardLogger(settings.folder, "tensorboard")],
        log_every_n_steps=log_every,
        check_val_every_n_epoch=check_every or 1,
        limit_val_batches=None if check_every else 0,
        enable_progress_bar=settings.progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def loss_curve(settings: Settings) -> dict[int, float]:
    """The training loss of every epoch, from the logs of a run and of what it resumed."""
    curve = {}
    for path in sorted(settings.folder.glob("csv/version_*/metrics.csv"), key=lambda p: int(p.parent.name[8:])):
        with path.open() as file:
            for line in csv.DictReader(file):
                if line.get("loss"):
                    curve[int(line["epoch"])] = float(line["loss"])
    return curve


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def match_parameters(build: Callable[[int], nn.Module], wanted: int) -> nn.Module:
    """The model of the width whose number of parameters comes closest to what is wanted."""
    with torch.device("meta"):
        width = min(range(4, 513, 4), key=lambda channels: abs(parameters(build(channels)) - wanted))
    return build(width)
