"""What the examples share: real digits, and training a classifier with Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

Predict = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


def sklearn_digits(test_images: int = 597) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    """scikit-learn's 1797 handwritten digits (N, 1, 8, 8) in [0, 1], labels, and indices to train and to test."""
    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(np.arange(len(images)), test_size=test_images, random_state=0, stratify=labels)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels), train, test


class Classifier(lightning.LightningModule):
    """Cross entropy and Adam; the learning rate is constant, or falls as half a cosine."""

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

    def training_step(self, batch: Any, _: int) -> Tensor:
        logits, labels = self.predict(self.model, batch)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        logits, labels = self.predict(self.model, batch)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        if self.constant:
            return optimizer
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def fit(classifier: Classifier, training: Iterable, testing: Iterable, epochs: int, device: str) -> float:
    """Train, and return the accuracy on the test images in percent; the model is left in eval mode."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0, check_val_every_n_epoch=epochs,
    )  # fmt: skip
    trainer.fit(classifier, training, testing)
    classifier.model.eval()
    return 100 * float(trainer.callback_metrics["accuracy"])


def mean_and_spread(values: list[float]) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    spread = f" +- {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"
