"""Training with Lightning, which logs and resumes: what it measures, and what comes out."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from .devices import index_of, is_cuda
from .loading import Batches
from .settings import Settings

Predict = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


class Learner(lightning.LightningModule):
    """Adam on a loss; the learning rate falls as half a cosine, with ``--warmup`` after one that rises (one cycle, in
    which the first beta goes from 0.95 to 0.85 and back, too). Measures ``metric``.

    Every epoch starts from a seed of its own, so a resumed run draws what an uninterrupted one would.
    """

    metric: str
    mode: str
    loss: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, model: nn.Module, predict: Predict, settings: Settings) -> None:
        super().__init__()
        self.model, self.predict, self.settings = model, predict, settings

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(1_000_003 * self.settings.seed + self.current_epoch)
        self.trainer.train_dataloader.epoch = self.current_epoch

    def training_step(self, batch: Any, number: int) -> Tensor:
        out, target = self.predict(self.model, batch)
        loss = self.loss(out, target)
        self.log("loss", loss, prog_bar=True, batch_size=len(target), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, number: int, name: str = "") -> None:
        out, target = self.predict(self.model, batch)
        value = self.measure(out, target).nan_to_num(nan=torch.inf if self.mode == "min" else -torch.inf)
        self.log(name + self.metric, value, prog_bar=True, batch_size=len(target))

    def test_step(self, batch: Any, number: int) -> None:
        self.validation_step(batch, number, "test_")

    def configure_optimizers(self):
        settings = self.settings
        optimizer = torch.optim.Adam(self.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
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
    """Counts the processor's seconds in steps."""

    seconds = 0.0

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        self.start = time.process_time()

    def on_train_batch_end(self, out: Any, batch: Any, number: int) -> None:
        self.seconds += time.process_time() - self.start

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = self.seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seconds = max(self.seconds, checkpoint["seconds"])  # tests load an earlier one


@dataclasses.dataclass
class Outcome:
    """What a run measured."""

    metric: str
    value: float
    parameters: int
    seconds: float
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


def fit(learner: Learner, training: Batches, validation: Batches | None, testing: Batches, checks: int = 20) -> Outcome:
    """Train and test; with validation data, the weights of the best of about ``checks`` checks on them are tested.

    Resumes from the last epoch's checkpoint where the run's folder has one. The model keeps the tested weights, in eval
    mode.
    """
    settings, metric = learner.settings, learner.metric
    if settings.again:
        shutil.rmtree(settings.folder, ignore_errors=True)
    timer, every, options = Timer(), 1, {"dirpath": settings.folder, "enable_version_counter": False}
    best = ModelCheckpoint(filename="best", monitor=metric, mode=learner.mode, save_on_train_epoch_end=False, **options)
    callbacks: list = [timer, ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **options)]
    if validation is not None:
        callbacks.insert(0, best)
        every = next(n for n in range(max(1, settings.epochs // checks), 0, -1) if settings.epochs % n == 0)
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = lightning.Trainer(
        default_root_dir=settings.folder,
        max_epochs=settings.epochs,
        accelerator="gpu" if is_cuda(settings.device) else "cpu",
        devices=[index_of(settings.device)] if is_cuda(settings.device) else 1,
        precision=settings.precision,
        gradient_clip_val=settings.clip or None,
        callbacks=callbacks,
        logger=CSVLogger(settings.folder, "csv"),
        enable_progress_bar=settings.progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=min(50, len(training)),
        check_val_every_n_epoch=every,
    )
    last = settings.folder / "last.ckpt"
    trainer.fit(learner, training, validation, ckpt_path=last if last.is_file() else None, weights_only=True)
    path = None if validation is None else best.best_model_path
    measured = trainer.test(learner, testing, ckpt_path=path, verbose=False, weights_only=True)[0][f"test_{metric}"]
    learner.model.eval()
    more = {} if validation is None else {"validation": float(f"{best.best_model_score:.7g}")}
    seconds = learner.seconds if isinstance(learner, Timed) else timer.time_elapsed("train")
    return Outcome(metric, float(measured), parameters(learner.model), seconds, more)


def with_best_weights(model: nn.Module, settings: Settings) -> nn.Module:
    """The model of a run in eval mode, with the weights that were best on validation data."""
    state = torch.load(settings.folder / "best.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict({key.removeprefix("model."): x for key, x in state.items()})
    return model.eval()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def closest_width(build: Callable[[int], nn.Module], wanted: int, widths: Sequence[int]) -> int:
    """The width, of rising ones, whose number of parameters comes closest to what is wanted. Random numbers drawn
    afterwards do not depend on the widths that were tried."""
    with torch.random.fork_rng():
        above = bisect.bisect_left(widths, wanted, key=lambda width: parameters(build(width)))
        near = widths[max(0, above - 1) : above + 1]
        return min(near, key=lambda width: abs(parameters(build(width)) - wanted))


def match_parameters(build: Callable[[int], nn.Module], wanted: int) -> nn.Module:
    """The model of the width whose number of parameters comes closest to what is wanted."""
    with torch.device("meta"):
        width = min(range(4, 513, 4), key=lambda channels: abs(parameters(build(channels)) - wanted))
    return build(width)
