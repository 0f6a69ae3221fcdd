"""Equivariant associative recall: find the vector that followed a given vector earlier in a sequence.

A vocabulary holds pairs of vectors, a key and a value of random directions and lengths in [1, vocabulary size]. A
sequence is pairs drawn from it and, last, one of the keys again; its value is to be predicted. With a random vocabulary
every sequence has its own and only retrieval solves the task; with a fixed one all share one, and training turns the
sequences by random rotations. Trains SE(3)-Hyena, SE(3)-Transformer, Hyena and Transformer for every length, prints the
test errors and draws the paper's Figure 4.

    python examples/associative_recall.py                      # small models, some minutes on two cores
    python examples/associative_recall.py --vocabulary random --lengths 32 --steps 2000 --models "SE(3)-Hyena"
    python examples/associative_recall.py --full --device cuda # the paper's widths, lengths 2^5 to 2^8, 300 epochs
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import lightning
import matplotlib
import numpy as np
import torch
from devices import add_device
from e3nn import o3
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training import Regressor, fit_best, match_parameters, mean_and_spread, parameters

from tg_equiattn.nn import Hyena, SE3Hyena, SE3Transformer, Transformer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODELS = {"SE(3)-Hyena": SE3Hyena, "SE(3)-Transformer": SE3Transformer, "Hyena": Hyena, "Transformer": Transformer}
CODES = 16  # channels of the positional encoding


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


def positional_codes(length: int) -> Tensor:
    """Sines and cosines of the place, (length, CODES)."""
    angle = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, CODES, 2) / CODES)
    return torch.cat([angle.sin(), angle.cos()], 1)


class Recall(Dataset):
    """Sequences and answers: the same ones always, or (``fresh``) new ones for every batch.

    Args:
        count: sequences.
        size: pairs of the vocabulary.
        length: tokens before the last key.
        seed: of everything drawn.
        vocabulary: what all share, each sequence turned by a random rotation; ``None`` gives each its own.
        fresh: whether to draw again each time.
        device: where sequences lie; they are drawn on the CPU, the same ones for every device.
    """

    def __init__(
        self,
        count: int,
        size: int,
        length: int,
        seed: int,
        vocabulary: Tensor | None,
        fresh: bool,
        device: str = "cpu",
    ) -> None:
        self.count, self.size, self.length, self.vocabulary, self.fresh = count, size, length, vocabulary, fresh
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens, self.answers = self._draw(count)

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        if self.vocabulary is None:
            own = vocabularies(count, self.size, self.generator)
            tokens, answers = sequences(own, self.length, self.generator)
            return tokens.to(self.device), answers.to(self.device)
        tokens, answers = sequences(self.vocabulary.expand(count, -1, -1, -1), self.length, self.generator)
        return self._turn(tokens.to(self.device), answers.to(self.device))

    def _turn(self, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        quaternions = torch.randn(len(tokens), 4, generator=self.generator)
        rotation = o3.quaternion_to_matrix(quaternions / quaternions.norm(dim=1, keepdim=True)).to(self.device)
        return tokens @ rotation.mT, (answers[:, None] @ rotation.mT)[:, 0]

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        tokens, answers = self.tokens[indices], self.answers[indices]
        if self.fresh:  # with a fixed vocabulary the same sequences, turned anew: the paper's augmentation
            drawn = self.vocabulary is None
            tokens, answers = self._draw(len(indices)) if drawn else self._turn(tokens, answers)
        return [tokens, answers]


def datasets(kind: str, length: int, options: argparse.Namespace) -> list[Recall]:
    """Training, validation and test sequences, the same for every model."""
    fixed = None
    if kind == "fixed":
        fixed = vocabularies(1, options.size, torch.Generator().manual_seed(10))
    counts = options.train, options.held_out, options.held_out
    return [
        Recall(count, options.size, length, seed, fixed, fresh=seed == 0, device=options.device)
        for seed, count in enumerate(counts)
    ]


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted and true answers."""
    tokens, answers = batch
    codes = positional_codes(tokens.shape[1]).to(tokens).expand(len(tokens), -1, -1)
    return model(codes, tokens[:, :, None])[1][:, 0], answers


def build(name: str, options: argparse.Namespace) -> nn.Module:
    """A model with the positional code and one vector in, and one vector, the mean over tokens, out."""
    shared = {"depth": options.depth, "pool": "mean"}
    if name.startswith("SE(3)"):
        return MODELS[name](
            CODES, 1, 0, 1, hidden_scalars=options.scalars, hidden_vectors=options.vectors, num_blocks=options.blocks,
            **shared,
        )  # fmt: skip
    wanted = parameters(build("SE(3)-Hyena", options))
    return match_parameters(lambda channels: MODELS[name](CODES, 1, 0, 1, channels=channels, **shared), wanted)


def table(errors: dict, options: argparse.Namespace) -> str:
    """Test errors by vocabulary, model and length."""
    rows = [
        f"| vocabulary | model | {' | '.join(map(str, options.lengths))} |",
        "|---" * (2 + len(options.lengths)) + "|",
    ]
    for kind in options.vocabulary:
        for name in (*options.models, "zero"):
            cells = " | ".join(mean_and_spread(errors[kind, name, length]) for length in options.lengths)
            rows.append(f"| {kind} | {name} | {cells} |")
    return "\n".join(rows)


def draw(errors: dict, options: argparse.Namespace, path: Path) -> None:
    """The paper's Figure 4: error against length."""
    figure, axes = plt.subplots(len(options.vocabulary), 1, figsize=(6, 3.5 * len(options.vocabulary)), squeeze=False,
                                layout="constrained")  # fmt: skip
    for kind, axis in zip(options.vocabulary, axes[:, 0], strict=True):
        for name in options.models:
            axis.plot(options.lengths, [np.mean(errors[kind, name, n]) for n in options.lengths], "o-", label=name)
        none = [np.mean(errors[kind, "zero", n]) for n in options.lengths]
        axis.plot(options.lengths, none, "k:", label="zero")
        axis.set(title=f"{kind} vocabulary", xlabel="tokens", ylabel="mean squared error", xscale="log", yscale="log")
        axis.set_xticks(options.lengths, map(str, options.lengths))
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--vocabulary", nargs="+", choices=["fixed", "random"], default=["fixed", "random"])
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens; default 16 32, or 32 64 128 256 with --full")
    parser.add_argument("--size", type=int, default=4, help="pairs of a vocabulary")
    parser.add_argument("--train", type=int, default=2600, help="sequences of an epoch")
    parser.add_argument("--held-out", type=int, default=200, help="validation and test sequences each")
    parser.add_argument("--epochs", type=int, help="default 10, or 300 with --full")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, help="default 0.003, or 0.001 with --full")
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument("--scalars", type=int, default=16, help="invariant width")
    parser.add_argument("--vectors", type=int, help="equivariant width; default 24, or 128 with --full")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--blocks", type=int, help="of every Clifford MLP; default 2, or 1 with --full")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--full", action="store_true", help="the paper's widths, lengths and schedule")
    add_device(parser)
    parser.add_argument("--output", type=Path, default=Path("out/associative_recall"))
    options = parser.parse_args()
    small = {"lengths": [16, 32], "epochs": 10, "learning_rate": 0.003, "vectors": 24, "blocks": 2}
    full = {"lengths": [32, 64, 128, 256], "epochs": 300, "learning_rate": 0.001, "vectors": 128, "blocks": 1}
    for name, value in (full if options.full else small).items():
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    if min(options.lengths) < 2 or any(length % 2 for length in options.lengths):
        parser.error(f"--lengths must be even and at least 2, got {options.lengths}")
    return options


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    errors: dict[tuple[str, str, int], list[float]] = {}
    for kind in options.vocabulary:
        for length in options.lengths:
            errors[kind, "zero", length] = [float(datasets(kind, length, options)[2].answers.square().mean())]
            for name in options.models:
                for seed in options.seeds:
                    lightning.seed_everything(seed, verbose=False)
                    model = build(name, options)
                    title = f"{kind} vocabulary, {length} tokens, {name}, seed {seed}"
                    print(f"\n{title}: {parameters(model):,} parameters")
                    training, *held_out = datasets(kind, length, options)
                    keep = {"collate_fn": lambda batch: batch}  # which the data set has put together
                    loaders = [DataLoader(training, options.batch, shuffle=True, **keep)]
                    loaders += [DataLoader(part, 200, **keep) for part in held_out]
                    learner = Regressor(model, predict, options.learning_rate, options.weight_decay)
                    error = fit_best(learner, *loaders, options.epochs, options.device)
                    errors.setdefault((kind, name, length), []).append(error)
                    print(f"{title}: test error {error:.3f}")
    report = table(errors, options)
    (options.output / "table.md").write_text(report + "\n")
    draw(errors, options, options.output / "errors.png")
    print(f"\n{report}\n\n{time.perf_counter() - start:.0f} s; written to {options.output}")


if __name__ == "__main__":
    main()
