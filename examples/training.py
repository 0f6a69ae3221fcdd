"""What the examples share: real digits, and training with Lightning."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from devices import is_cuda
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

Predict = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


def sklearn_digits(test_images: int = 597) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    """scikit-learn's 1797 handwritten digits (N, 1, 8, 8) in [0, 1], labels, and indices to train and to test."""
    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(np.arange(len(images)), test_size=test_images, random_state=0, stratify=labels)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels), train, test


def batches(
    data: TensorDataset, size: int, device: str = "cpu", shuffle: bool = False, drop_last: bool = False
) -> DataLoader:
    """Batches of tensors that lie on the device: moved there once, and every batch one indexing of each.

    The order is that of a plain DataLoader from the same seed.
    """
    data = TensorDataset(*(x.to(device) for x in data.tensors))
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    return DataLoader(data, sampler=BatchSampler(order, size, drop_last), batch_size=None)


class Learner(lightning.LightningModule):
    """Adam on a loss; the learning rate is constant, or falls as half a cosine. Logs ``metric`` on validation data."""

    metric: str

    def __init__(
        self,
        model: nn.Module,
        predict: Predict,
        learning_rate: float,
        weight_decay: float = 0.0,
        constant: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.predict = model, predict
        self.learning_rate, self.weight_decay, self.constant = learning_rate, weight_decay, constant

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, _: int) -> Tensor:
        out, target = self.predict(self.model, batch)
        loss = self.loss(out, target)
        self.log("loss", loss, prog_bar=True, batch_size=len(target))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        out, target = self.predict(self.model, batch)
        self.log(self.metric, self.measure(out, target), prog_bar=True, batch_size=len(target))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        if self.constant:
            return optimizer
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


class Classifier(Learner):
    """Cross entropy, measured by accuracy."""

    metric = "accuracy"

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def measure(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(1) == labels).float().mean()


class Regressor(Learner):
    """Mean squared error."""

    metric = "error"

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)

    measure = loss


def fit(classifier: Classifier, training: Iterable, testing: Iterable, epochs: int, device: str) -> float:
    """Train, and return the accuracy on the test images in percent; the model is left in eval mode."""
    trainer = _trainer(epochs, device, check_val_every_n_epoch=epochs, enable_checkpointing=False)
    trainer.fit(classifier, training, testing)
    classifier.model.eval()
    return 100 * float(trainer.callback_metrics[classifier.metric])


def fit_best(
    regressor: Regressor,
    training: Iterable,
    validation: Iterable,
    testing: Iterable,
    epochs: int,
    device: str,
    callbacks: Iterable[lightning.Callback] = (),
    checks: int = 20,
) -> float:
    """Train, go back to the weights of the lowest of ``checks`` validation errors, and return the test error."""
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor=regressor.metric, mode="min")
        trainer = _trainer(
            epochs, device, check_val_every_n_epoch=max(1, epochs // checks), callbacks=[best, *callbacks]
        )
        trainer.fit(regressor, training, validation)
        regressor.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    return float(trainer.validate(regressor, testing, verbose=False)[0][regressor.metric])


def _trainer(epochs: int, device: str, **options: Any) -> lightning.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    index = torch.device(device).index
    return lightning.Trainer(
        max_epochs=epochs, accelerator="gpu" if is_cuda(device) else "cpu", devices=1 if index is None else [index],
        logger=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def match_parameters(build: Callable[[int], nn.Module], wanted: int) -> nn.Module:
    """The model of the width whose number of parameters comes closest to what is wanted."""
    with torch.device("meta"):
        width = min(range(4, 513, 4), key=lambda channels: abs(parameters(build(channels)) - wanted))
    return build(width)


def mean_and_spread(values: list[float], digits: int = 2) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    spread = f" +- {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"
