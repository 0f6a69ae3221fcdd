"""A study of seconds for the tests of the examples' harness: a small regression that draws in every step."""

import dataclasses
import os
import signal
from typing import ClassVar

import torch
from harness import study
from harness.loading import tensor_batches
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(Settings):
    STUDY: ClassVar[str] = "toy_study"
    SWEEP: ClassVar[tuple[str, ...]] = ("widths", "seeds")

    widths: tuple[int, ...] = (8,)
    """of the hidden layer"""
    dropout: float = 0.2
    """of it"""
    validate: bool = True
    """choose the epoch by held out data"""
    epochs: int = 4
    batch: int = 8
    learning_rate: float = 0.01
    progress: bool = False


PRESETS = {"quick": Toy(epochs=1)}


class Learner(Regressor):
    def training_step(self, batch, number):
        if number == 2 and self.current_epoch == int(os.environ.get("KILL_IN_EPOCH", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, number)


def noisy(batch, generator):
    x, y = batch
    return [x + 0.1 * torch.randn(x.shape, generator=generator), y]


def data(settings):
    x = torch.randn(43, 3, generator=torch.Generator().manual_seed(5))
    y = (x[:, :1] * x[:, 1:2] - x[:, 2:]).sin()
    training = tensor_batches([x, y], settings.batch, settings.seed, noisy)
    held_out = tensor_batches([x[:20] + 0.1, y[:20]], 7)
    return training, held_out if settings.validate else None, tensor_batches([x[20:] - 0.1, y[20:]], 9)


def train(settings) -> Outcome:
    (width,) = settings.widths
    drop = nn.Dropout(settings.dropout)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), drop, nn.Linear(width, 1))
    learner = Learner(model, lambda model, batch: (model(batch[0]), batch[1]), settings)
    return fit(learner, *data(settings))


def report(rows):
    lines = [
        [str(width), mean_and_spread(row.value for row in group)] for (width,), group in grouped(rows, "widths").items()
    ]
    return {"errors": markdown(["widths", "error"], lines)}


if __name__ == "__main__":
    study.main(Toy(), PRESETS, __doc__, train, report)
