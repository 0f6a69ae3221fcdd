"""Train GE-ViTs and G-CNNs on rotated handwritten digits and look at where they are equivariant.

Real digits (scikit-learn's 1797 images of 8 x 8) are enlarged and rotated by uniform angles, one angle an image, and
split by image. Models are built from escnn field types: Z2_SA (translations), R4_SA and R8_SA (4 and 8 rotations) and
R4M_SA (4 rotations and reflections), each with one or several relations of the group encoding, with heads that start at
places of their own (locality) or without, and escnn's own group convolutions with as many parameters as R4_SA, R8_SA
and R4M_SA; in one of them the last convolution is attention. Prints tables like GE-ViT's Tables 1 and 2, and the
numbers of its Figure 7.

    python examples/studies/rotated_digits.py                                    # a few minutes on two cores
    python examples/studies/rotated_digits.py --models Z2_SA R8_SA --seeds 0 1 2
    python examples/studies/rotated_digits.py --study --models R4_SA --relation relative --locality None 4
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from baselines.gcnn import GCNN, convolution, gspaces, matched, nn
from data.rotated_digits import Part, parts
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread, published
from harness.training import Classifier, Outcome, fit, parameters
from tg_equiattn.integrations.escnn import R2GroupAttention, group_from_gspace
from torch import Tensor

from tg_equiattn.nn import GroupTransformer
from tg_equiattn.testing import act

Model = Literal["Z2_SA", "R4_SA", "R8_SA", "R4M_SA", "C4 G-CNN", "C8 G-CNN", "D4 G-CNN", "G-CNN + attention"]
Relation = Literal["ge_vit", "gsa", "lifted", "relative", "frame", "separable"]
GSPACES = {
    "Z2_SA": gspaces.trivialOnR2(),
    "R4_SA": gspaces.rot2dOnR2(4),
    "R8_SA": gspaces.rot2dOnR2(8),
    "R4M_SA": gspaces.flipRot2dOnR2(4),
}
EQUALS = {"C4 G-CNN": "R4_SA", "C8 G-CNN": "R8_SA", "D4 G-CNN": "R4M_SA"}  # of the same group, and about as large
GROUPS = {name: number for number, pair in enumerate(EQUALS.items()) for name in pair}  # in the order of tables
WITHOUT_RELATION = ("Z2_SA", *EQUALS)  # one element has one relation, convolutions none
PAPERS = {"ge_vit": "GE-ViT", "gsa": "GSA-Nets"}
MIXED = "G-CNN + attention"  # the C4 G-CNN with attention in place of its last convolution
FRAMED = ("frame", "separable")  # with heads of their own; the tables of relations are of the others
KINDS = [f"{relation}{how}" for relation in Relation.__args__ for how in (", locality", "")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedDigits(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "rotated_digits"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "relation", "locality", "seeds")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = (*Settings.MAY_BE_ZERO, "content_heads")
    SHOWN: ClassVar[tuple[str, ...]] = (
        "epochs", "learning_rate", "heads", "head_channels", "content_heads", "channels", "blocks", "data",
    )  # fmt: skip

    models: tuple[Model, ...] = ("Z2_SA", "R4_SA", "R4M_SA")
    """which to train; a G-CNN is escnn's, with 3 x 3 convolutions and at least as many parameters as the attention"""
    relation: tuple[Relation, ...] = ("ge_vit", "gsa")
    """relations to compare; separable is frame without content, which is no attention: a separable group convolution"""
    kernel_size: int = 3
    """odd window of attention"""
    locality: tuple[float | None, ...] = (4.0,)
    """strength by which heads start at places of their own; None is without, as the published gsa always is"""
    size: int = 16
    """pixels a side, even"""
    train_images: int | None = None
    """use only the first of the training images"""
    data: Path | None = None
    """folder with MNIST's test images, which are rotated here; by default scikit-learn's digits"""
    channels: int = 16
    """width of every layer"""
    blocks: int = 2
    """attention blocks after the lifting attention"""
    heads: int = 8
    """of every attention layer"""
    head_channels: int | None = 2
    """width of a head; None is half the channels"""
    content_heads: int | None = None
    """of frames; None is an eighth of the heads"""
    epochs: int = 8
    """passes over the training images"""
    batch: int = 16
    """images of one step"""
    learning_rate: float = 0.02
    """of Adam, at the start"""
    weight_decay: float = 1e-4
    """of Adam"""

    def check(self) -> None:
        super().check()
        if self.kernel_size % 2 == 0:
            raise ValueError(f"--kernel-size must be odd, got {self.kernel_size}")
        if self.size % 2:
            raise ValueError(f"--size must be even, as the models pool 2 x 2, got {self.size}")

    def runs(self) -> Iterator[RotatedDigits]:
        """Of combinations that are the same model only the first."""
        seen = []
        for run in super().runs():
            (name,) = run.models
            if name in WITHOUT_RELATION:
                run = dataclasses.replace(run, relation=("ge_vit",))
            if name in EQUALS or run.relation == ("gsa",):
                run = dataclasses.replace(run, locality=(None,))
            if run not in seen:
                seen.append(run)
                yield run


SMALL = {"size": 12, "blocks": 1, "results": study.committed("rotated_digits")}
PRESETS = {
    "quick": RotatedDigits(
        models=Model.__args__, train_images=32, size=8, channels=4, heads=1, head_channels=2, blocks=1, epochs=1,
        batch=8,
    ),
    "study": RotatedDigits(
        models=("Z2_SA", "R4_SA", "R8_SA", "R4M_SA", *EQUALS), relation=("ge_vit", "relative", "gsa"),
        seeds=(0, 1, 2, 3, 4), **SMALL,
    ),
}  # fmt: skip


class ResidualAttention(nn.EquivariantModule):
    """x + attention(norm(x)), between regular fields."""

    def __init__(self, fields: nn.FieldType, settings: RotatedDigits) -> None:
        super().__init__()
        self.in_type = self.out_type = fields
        self.norm = nn.InnerBatchNorm(fields)
        self.attention = R2GroupAttention(
            fields, fields, heads=settings.heads, head_channels=settings.head_channels,
            kernel_size=settings.kernel_size, relation=settings.relation[0],
            locality=settings.locality[0], encoding="joint", window_shape="square",
        )  # fmt: skip

    def forward(self, x: nn.GeometricTensor) -> nn.GeometricTensor:
        return x + self.attention(self.norm(x))

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape


def build(settings: RotatedDigits) -> torch.nn.Module:
    """The model of a single run."""
    (name,), (relation,), (locality,) = settings.models, settings.relation, settings.locality
    if name in EQUALS:
        gspace, layers = GSPACES[EQUALS[name]], [convolution] * settings.blocks
        wanted = parameters(build(dataclasses.replace(settings, models=(EQUALS[name],))))
        return matched(lambda width: GCNN(gspace, width, layers), wanted, fewer=False)
    if name == MIXED:
        gspace, layers = GSPACES["R4_SA"], [convolution] * settings.blocks
        layers[-1] = lambda fields: ResidualAttention(fields, settings)
        wanted = parameters(build(dataclasses.replace(settings, models=("C4 G-CNN",))))
        return matched(lambda width: GCNN(gspace, width, layers), wanted, 6)
    gspace = GSPACES[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="relation='gsa'")
        count = -(-settings.heads // 8) if settings.content_heads is None else settings.content_heads
        attention = {
            "head_channels": settings.head_channels, "content_heads": {"separable": 0, "frame": count}.get(relation),
            "encoding": "joint", "locality": locality, "window_shape": "square",  # as the papers, with 8 rotations too
        }  # fmt: skip
        return GroupTransformer(
            group_from_gspace(gspace), 1, 10, channels=(settings.channels,) * settings.blocks, heads=settings.heads,
            kernel_size=settings.kernel_size, relation="frame" if relation == "separable" else relation, pools=(0,),
            norm="batch", attn_kwargs=attention,
        )  # fmt: skip


def predict(model: torch.nn.Module, batch: Part) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch."""
    images, labels = batch
    return model(images), labels


def train(settings: RotatedDigits) -> Outcome:
    """One model, trained and tested, and the equivariance error of its features."""
    training, testing = parts(settings)
    learner = Classifier(build(settings), predict, settings)
    batches = tensor_batches(training, settings.batch, settings.seed, device=settings.device)
    outcome = fit(learner, batches, None, tensor_batches(testing, 256, device=settings.device))
    images = testing[0][:8].to(next(learner.model.parameters()).device)
    outcome.more |= equivariance(learner.model, images)
    return outcome


def error_map(model: torch.nn.Module, images: Tensor, element: int) -> tuple[Tensor, Tensor]:
    """|f(L_g x) - L_g f(x)|, and L_g f(x), of the last regular feature maps."""
    expected = act(model.features(images), model.group, element)
    return (model.features(act(images, model.group, element)) - expected).abs(), expected


@torch.no_grad()
def equivariance(model: torch.nn.Module, images: Tensor) -> dict[str, float]:
    """Over all elements that map the grid to itself the mean error, and the largest relative to the largest feature."""
    elements = model.group.lattice.nonzero().flatten().tolist()
    maps = [error_map(model, images, element) for element in elements if element != model.group.identity]
    if not maps:
        return {}
    mean = sum(float(error.mean()) for error, _ in maps) / len(maps)
    return {"mean error": mean, "max error": max(float(error.max() / f.abs().max()) for error, f in maps)}


def relation_of(row: Row) -> str:
    return "-" if row.setting("models") in WITHOUT_RELATION else row.setting("relation")


def is_convolution(row: Row) -> bool:
    return row.setting("models") in EQUALS


def model_of(row: Row) -> str:
    """Its name, and the learning rate of a convolution that was trained with another than is usual here."""
    name, rate = row.setting("models"), row.setting("learning_rate")
    return f"{name}, rate {rate:g}" if is_convolution(row) and rate != RotatedDigits.learning_rate else name


def kind(row: Row) -> str:
    """The relation, and whether heads have places."""
    return row.setting("relation") + (", locality" if row.setting("locality") is not None else "")


def whole(row: Row) -> bool:
    """True if the locality, where there is one, has the strength of the study."""
    return row.setting("locality") in (None, 4.0)


def of_main_setting(
    rows: list[Row], names: tuple[str, ...] = ("size", "epochs", "learning_rate", "heads", "channels")
) -> list[Row]:
    """Rows of the image size, epochs, window and so on that most attention networks have; convolutions have their own
    windows and learning rates."""
    settings = [tuple(map(row.setting, names)) for row in rows if not is_convolution(row)]
    if not settings:
        return rows
    main = max(dict.fromkeys(settings), key=settings.count)
    mine = [row for row in rows if (row.setting("size"), row.setting("epochs")) == main[:2]]
    return [row for row in mine if is_convolution(row) or tuple(map(row.setting, names)) == main]


def values(rows: list[Row]) -> str:
    return mean_and_spread(row.value for row in rows) if rows else "-"


def accuracy(rows: list[Row]) -> str:
    """GE-ViT's Tables 2 and 4: models down, relations across."""
    kinds = sorted(dict.fromkeys(kind(row) for row in rows if not is_convolution(row)), key=KINDS.index)
    columns = [PAPERS[relation] for relation in PAPERS if any(k.startswith(relation) for k in kinds)]
    paper, convolutions = published("GE-ViT Table 2"), published("GE-ViT Table 4")
    known = {(name, "GE-ViT"): value for (name, _), value in convolutions.items()} | paper
    lines = []
    for (name, _), group in grouped(rows, "models", "learning_rate").items():
        cells = [values([row for row in group if kind(row) == k and not is_convolution(row)]) for k in kinds]
        counts = dict.fromkeys(f"{row.parameters:,}" for row in group)
        plain = values([row for row in group if is_convolution(row)])
        beside = (known.get((name, column), "-") for column in columns)
        lines.append([model_of(group[0]), plain, *cells, " to ".join(counts), *beside])
    head = ["model", "convolutions", *kinds, "parameters", *(f"{c} paper, rotMNIST" for c in columns)]
    return markdown(head, lines)


def in_frames(rows: list[Row]) -> str:
    """Frames and separable convolutions beside the G-CNN of the same group, with every number of epochs and at every
    rate they were trained with."""
    lines = []
    for group in grouped(rows, "models", "relation", "content_heads", "epochs", "learning_rate").values():
        name, epochs, rate = (group[0].setting(key) for key in ("models", "epochs", "learning_rate"))
        what = "-" if is_convolution(group[0]) else group[0].setting("relation")
        count = group[0].setting("content_heads")
        what += "" if count is None else f", {count} of {group[0].setting('heads')} heads by content"
        order = epochs, GROUPS[name], what, rate
        cells = [name, what, f"{rate:g}", f"{group[0].parameters:,}", values(group), str(len(group))]
        lines.append((order, [str(epochs), *cells]))
    head = ["epochs", "model", "relation", "rate", "parameters", "accuracy", "seeds"]
    return markdown(head, [line for _, line in sorted(lines)])


def mixed(rows: list[Row]) -> str:
    """The C4 G-CNN with and without attention in place of its last convolution."""
    lines = [
        [name, values(group), f"{group[0].parameters:,}", f"{np.mean([row.seconds for row in group]):.0f}"]
        for (name,), group in grouped(rows, "models").items()
    ]
    return markdown(["model", "accuracy", "parameters", "seconds"], lines)


def ablations(rows: list[Row]) -> str:
    """Accuracy by the strength of the locality."""
    names = [name for name in Model.__args__ if any(row.setting("models") == name for row in rows)]
    lines = []
    for (locality, heads), group in grouped(rows, "locality", "heads").items():
        what = "no locality" if locality is None else f"locality strength {locality:g}"
        what += "" if heads == RotatedDigits.heads else f", {heads} heads"
        lines.append([what, *(values([row for row in group if row.setting("models") == name]) for name in names)])
    return markdown(["locality", *names], lines)


def errors(rows: list[Row]) -> str:
    """GE-ViT's Figure 7 in numbers: the mean error, and the worst of all seeds relative to the largest feature."""
    paper, lines = published("GE-ViT Figure 7"), []
    for group in grouped(rows, "models", "relation", "learning_rate").values():
        relation = relation_of(group[0])
        mean = np.mean([row.more["mean error"] for row in group])
        worst = max(row.more["max error"] for row in group)
        known = paper.get((PAPERS.get(relation, ""), "mean error"), "-")
        lines.append([model_of(group[0]), relation, f"{mean:.1e}", f"{worst:.1e}", known])
    return markdown(["model", "relation", "mean error", "max error / max feature", "mean error, paper"], lines)


def of_published(rows: list[Row]) -> str:
    """Of digits from files, beside the papers' own numbers, which are of all of rotated MNIST."""
    paper = published("GE-ViT Table 2")
    lines = []
    names = "models", "relation", "size", "epochs", "learning_rate"
    for group in grouped(rows, *names).values():
        first = group[0]
        what = "-" if is_convolution(first) else kind(first)
        known = paper.get((first.setting("models"), PAPERS.get(first.setting("relation"), "")), "-")
        size = f"{14 if first.setting('size') == 14 else 28}"
        cells = [size, str(first.setting("epochs")), f"{first.setting('learning_rate'):g}"]
        lines.append([model_of(first), what, *cells, f"{first.parameters:,}", values(group), str(len(group)), known])
    settings = ["side", "epochs", "rate", "parameters"]
    return markdown(["model", "relation", *settings, "accuracy", "seeds", "paper, rotMNIST"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The tables there are rows for."""
    rows = sorted(rows, key=lambda row: Model.__args__.index(row.setting("models")))
    of_files = [row for row in rows if row.setting("data") is not None]
    if of_files and len(of_files) < len(rows):
        rest = [row for row in rows if row.setting("data") is None]
        return report(rest) | {"published": of_published(of_files)}
    shapes = [(row.setting("blocks"), row.setting("channels")) for row in rows if row.setting("models") == MIXED]
    beside = [row for row in rows if (row.setting("blocks"), row.setting("channels")) in shapes]
    if beside and len(beside) < len(rows):
        return report([row for row in rows if row not in beside]) | {"mixed": mixed(beside)}
    every, rows = rows, [row for row in rows if whole(row)]
    main = of_main_setting(rows)
    tables = {"accuracy": accuracy(main)} | ({"published": of_published(of_files)} if of_files else {})
    if framed := [row for row in rows if row.setting("relation") in FRAMED]:
        epochs = {row.setting("epochs") for row in framed}
        beside = [row for row in rows if is_convolution(row) and row.setting("epochs") in epochs]
        tables["frames"] = in_frames(framed + beside)
    alike = of_main_setting(every, ("size", "epochs", "learning_rate"))
    if less := [row for row in alike if row.setting("relation") == "relative" and not is_convolution(row)]:
        tables["ablations"] = ablations(less)
    if measured := [row for row in main if "mean error" in row.more]:
        tables["equivariance"] = errors(measured)
    return tables


if __name__ == "__main__":
    study.main(RotatedDigits(), PRESETS, __doc__, train, report)
