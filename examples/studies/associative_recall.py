"""Equivariant associative recall: find the vector that followed a given vector earlier in a sequence.

A vocabulary holds pairs of vectors, a key and a value of random directions and lengths in [1, vocabulary size]. A
sequence is pairs drawn from it and, last, one of the keys again; its value is to be predicted. With a random vocabulary
every sequence has its own and only retrieval solves the task; with a fixed one all share one, and every sequence is
turned by a rotation of its own. Training draws new sequences for every step. Trains SE(3)-Hyena, SE(3)-Transformer,
Hyena and Transformer for every length, and prints the test errors beside the error of predicting zero (the paper's
Figure 4, which gives no numbers). In all of them a short convolution shows every token its neighbors, so that what is
compared is what mixes far ones; the published SE(3)-Hyena has none, and is there too. As a control, one model gets the
tokens of each sequence in a random order.

    python examples/studies/associative_recall.py                      # small models
    python examples/studies/associative_recall.py --study --vocabulary random --lengths 32 --models "SE(3)-Hyena"
    python examples/studies/associative_recall.py --full --device cuda # the paper's widths and lengths, 300 epochs
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from baselines.published_norm import divided_by_length
from baselines.sequence_models import Hyena, Transformer
from e3nn import o3
from harness import study
from harness.loading import Batches, tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit, match_parameters, parameters
from torch import Tensor, nn

from tg_equiattn.nn import SE3Hyena


class Shuffled(nn.Module):
    """A model whose tokens, but for the key that is asked for, come in a random order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, codes: Tensor, tokens: Tensor) -> Any:
        order = torch.rand(tokens.shape[:2], device=tokens.device)
        order[:, -1] = 1
        return self.model(codes, tokens.gather(1, order.argsort(1)[..., None, None].expand_as(tokens)))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "SE(3)-Hyena": SE3Hyena,
    "SE(3)-Hyena, implicit filter": SE3Hyena,
    "SE(3)-Hyena, mixed products": SE3Hyena,
    "SE(3)-Hyena, as published": lambda *channels, **options: divided_by_length(SE3Hyena(*channels, **options)),
    "SE(3)-Hyena, shuffled": lambda *channels, **options: Shuffled(SE3Hyena(*channels, **options)),
    "SE(3)-Transformer": functools.partial(SE3Hyena, attention=True),
    "Hyena": functools.partial(Hyena, short_conv=3),
    "Transformer": functools.partial(Transformer, short_conv=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SE(3)-Hyena": {"short_conv": 3},
    "SE(3)-Hyena, implicit filter": {"short_conv": 3, "filter": "implicit", "mixed_products": False},
    "SE(3)-Hyena, mixed products": {"short_conv": 3, "filter": "implicit"},
    "SE(3)-Hyena, as published": {},
    "SE(3)-Hyena, shuffled": {"short_conv": 3},
    "SE(3)-Transformer": {"short_conv": 3},
}
Model = Literal[
    "SE(3)-Hyena", "SE(3)-Hyena, implicit filter", "SE(3)-Hyena, mixed products", "SE(3)-Hyena, as published",
    "SE(3)-Hyena, shuffled", "SE(3)-Transformer", "Hyena", "Transformer",
]  # fmt: skip
CODES = 16  # channels of the positional encoding
SHORT, STEP = 32, 1024  # where a curriculum begins, and vectors of a step on short sequences
SEEDS = {"validation": 1, "test": 2, "vocabulary": 10}  # data do not depend on the seed of training


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssociativeRecall(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "associative_recall"
    SWEEP: ClassVar[tuple[str, ...]] = ("vocabulary", "lengths", "models", "seeds")

    models: tuple[Model, ...] = get_args(Model)
    """which to train"""
    vocabulary: tuple[Literal["fixed", "random"], ...] = ("fixed", "random")
    """one that all sequences share, or one for each"""
    lengths: tuple[int, ...] = (16, 32)
    """vectors before the key that is asked for"""
    size: int = 4
    """pairs of a vocabulary"""
    train: int = 2600
    """sequences of an epoch"""
    curriculum: bool = False
    """train on sequences that grow, from 32 vectors on, to all of them over three fifths of the epochs; of short ones
    more come in a step, 1,024 vectors"""
    held_out: int = 200
    """sequences to choose the epoch with, and as many to test on"""
    scalars: int = 16
    """invariant width"""
    vectors: int = 24
    """equivariant width"""
    num_layers: int = 3
    """operators"""
    blocks: int = 2
    """of every Clifford MLP"""
    epochs: int = 10
    batch: int = 32
    learning_rate: float = 0.003
    weight_decay: float = 1e-5

    def check(self) -> None:
        super().check()
        if min(self.lengths) < 2 or any(length % 2 for length in self.lengths):
            raise ValueError(f"{flag('lengths')} must be even and at least 2, got {list(self.lengths)}")


PRESETS = {
    "quick": AssociativeRecall(
        lengths=(6, 10), train=32, held_out=8, epochs=1, vectors=4, scalars=3, num_layers=1, blocks=1
    ),
    "study": AssociativeRecall(
        lengths=(32, 64, 128, 256), curriculum=True, train=640, batch=8, epochs=16, learning_rate=0.01, warmup=0.3,
        clip=1.0, vectors=16, num_layers=2, blocks=1, results=study.committed("associative_recall"),
    ),
    "full": AssociativeRecall(lengths=(32, 64, 128, 256), epochs=300, learning_rate=0.001, vectors=128, blocks=1),
}  # fmt: skip


def vocabularies(count: int, size: int, generator: torch.Generator) -> Tensor:
    """``count`` vocabularies of ``size`` pairs of vectors, (count, size, 2, 3)."""
    direction = torch.randn(count, size, 2, 3, generator=generator)
    length = 1 + (size - 1) * torch.rand(count, size, 2, 1, generator=generator)
    return length * direction / direction.norm(dim=-1, keepdim=True)


def sequences(vocabulary: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """From vocabularies (B, size, 2, 3), tokens (B, length + 1, 3): pairs and a key seen among them; and its value."""
    count, size = vocabulary.shape[:2]
    pairs = torch.randint(size, (count, length // 2), generator=generator)
    asked = pairs.gather(1, torch.randint(length // 2, (count, 1), generator=generator))[:, 0]
    row = torch.arange(count)
    tokens = vocabulary[row[:, None], pairs].flatten(1, 2)
    return torch.cat([tokens, vocabulary[row, asked, :1]], 1), vocabulary[row, asked, 1]


def turned(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Every sequence and its answer, turned by a rotation of its own."""
    tokens, answers = batch
    quaternions = torch.randn(len(tokens), 4, generator=generator)
    rotation = o3.quaternion_to_matrix(quaternions / quaternions.norm(dim=1, keepdim=True)).to(tokens)
    return [tokens @ rotation.mT, (answers[:, None] @ rotation.mT)[:, 0]]


def drawn(settings: AssociativeRecall, count: int, length: int, generator: torch.Generator) -> list[Tensor]:
    """Sequences and answers with one vocabulary each, or all with the fixed one and turned."""
    if settings.vocabulary == ("random",):
        return list(sequences(vocabularies(count, settings.size, generator), length, generator))
    fixed = vocabularies(1, settings.size, torch.Generator().manual_seed(SEEDS["vocabulary"]))
    return turned(list(sequences(fixed.expand(count, -1, -1, -1), length, generator)), generator)


def lesson(settings: AssociativeRecall, epoch: int) -> tuple[int, int]:
    """How many sequences of which length are in a step of this epoch."""
    (length,) = settings.lengths
    if not settings.curriculum:
        return settings.batch, length
    first = min(SHORT, length)
    grown = int(first * (length / first) ** min(1.0, epoch / (0.6 * settings.epochs)))
    return max(settings.batch, STEP // grown), grown - grown % 2


def data(settings: AssociativeRecall) -> list[Batches]:
    """Training, validation and test sequences; training draws new ones for every step. All are drawn on the CPU, the
    same on every device."""

    def fresh(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        count, length = lesson(settings, training.epoch)
        return [x.to(batch[0].device) for x in drawn(settings, count, length, generator)]

    numbers = [torch.arange(settings.train)]
    training = tensor_batches(numbers, settings.batch, settings.seed, fresh, settings.device)
    held_out = [
        drawn(settings, settings.held_out, settings.lengths[0], torch.Generator().manual_seed(SEEDS[name]))
        for name in ("validation", "test")
    ]
    return [training, *(tensor_batches(tensors, 200, device=settings.device) for tensors in held_out)]


def positional_codes(length: int) -> Tensor:
    """Sines and cosines of the place, (length, CODES)."""
    angle = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, CODES, 2) / CODES)
    return torch.cat([angle.sin(), angle.cos()], 1)


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted and true answers."""
    tokens, answers = batch
    codes = positional_codes(tokens.shape[1]).to(tokens).expand(len(tokens), -1, -1)
    return model(codes, tokens[:, :, None])[1][:, 0], answers


def build(name: str, settings: AssociativeRecall) -> nn.Module:
    """A model with the positional code and one vector in, and one vector, the mean over tokens, out."""
    shared = {"num_layers": settings.num_layers, "pool": "mean"}
    if name.startswith("SE(3)"):
        return MODELS[name](
            CODES, 1, 0, 1, hidden_scalars=settings.scalars, hidden_vectors=settings.vectors,
            num_blocks=settings.blocks, attn_kwargs=OPTIONS[name], **shared,
        )  # fmt: skip
    wanted = parameters(build("SE(3)-Hyena", settings))
    return match_parameters(lambda channels: MODELS[name](CODES, 1, 0, 1, channels=channels, **shared), wanted)


def train(settings: AssociativeRecall) -> Outcome:
    """One model on one kind of vocabulary and one length, trained and tested."""
    (name,) = settings.models
    training, validation, testing = data(settings)
    outcome = fit(Regressor(build(name, settings), predict, settings), training, validation, testing, checks=8)
    answers = testing.get(list(range(testing.length)))[1]
    outcome.more["zero"] = float(answers.square().mean())
    return outcome


def by_length(rows: list[Row]) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Test errors by vocabulary, model ("zero" last) and length."""
    errors: dict[str, dict[str, dict[int, list[float]]]] = {}
    for (kind, name, length), group in grouped(rows, "vocabulary", "models", "lengths").items():
        errors.setdefault(kind, {}).setdefault(name, {})[length] = [row.value for row in group]
    for (kind, length), group in grouped(rows, "vocabulary", "lengths").items():
        errors[kind].setdefault("zero", {})[length] = [group[0].more["zero"]]
    return errors


def table(rows: list[Row]) -> str:
    """Test errors by vocabulary and model, a column for every length."""
    lengths = sorted({row.setting("lengths") for row in rows})
    lines = []
    for kind, models in by_length(rows).items():
        for name, errors in models.items():
            cells = (mean_and_spread(errors[length], 4) if length in errors else "-" for length in lengths)
            lines.append([kind, name, *cells])
    return markdown(["vocabulary", "model", *(f"{length} tokens" for length in lengths)], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of errors."""
    return {"errors": table(rows)}


if __name__ == "__main__":
    study.main(AssociativeRecall(), PRESETS, __doc__, train, report)
