"""Equivariance errors of trained networks, and figures of feature maps under symmetries (GE-ViT Fig. 4 to 7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from harness.settings import Settings
from harness.training import CheckpointError, Learner, load
from torch import Tensor, nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tg_equiattn.testing import act


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> Tensor:
    """The last regular feature map (B, C, |H|, H, W)."""
    return model.features(images)


def moving_elements(model: nn.Module) -> list[int]:
    """The elements of the model's group that move an image and map the pixel grid to itself."""
    return [g for g in model.group.lattice.nonzero().flatten().tolist() if g != model.group.identity]


def error_map(model: nn.Module, images: Tensor, element: int) -> tuple[Tensor, Tensor]:
    """|f(L_g x) - L_g f(x)|, and L_g f(x)."""
    expected = act(features(model, images), model.group, element)
    error = (features(model, act(images, model.group, element)) - expected).abs()
    return error, expected


def equivariance(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Over all moving elements the mean error, and the largest relative to the largest feature; none for Z2_SA."""
    maps = [error_map(model, images, element) for element in moving_elements(model)]
    if not maps:
        return {}
    mean = sum(float(error.mean()) for error, _ in maps) / len(maps)
    return {"mean error": mean, "max error": max(float(error.max() / f.abs().max()) for error, f in maps)}


def _show(axis, image: Tensor, title: str = "", **options) -> None:
    axis.imshow(image, **({"cmap": "viridis"} | options))
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])


def _rows(rows: list[tuple[Tensor, Tensor, str]], path: Path, title: str) -> None:
    """Each row: an image, then the channel mean of its feature map at every group element."""
    elements = rows[0][1].shape[2]
    figure, axes = plt.subplots(len(rows), 1 + elements, squeeze=False,
                                figsize=(1.5 * (1 + elements), 1.9 * len(rows)))  # fmt: skip
    for line, (image, feature, label) in zip(axes, rows, strict=True):
        _show(line[0], image[0, 0], label, cmap="gray")
        mean = feature[0].mean(0)
        for element in range(elements):
            _show(line[1 + element], mean[element], f"h = {element}", vmin=float(mean.min()), vmax=float(mean.max()))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_translation(model: nn.Module, image: Tensor, path: Path) -> None:
    """GE-ViT Fig. 4: a shift of the image by 2 and 4 pixels shifts the (2 x 2 pooled) feature map by 1 and 2."""
    image = F.pad(image, [4] * 4)  # room to move without leaving the picture
    shifted = image.roll((2, 4), (-2, -1))
    feature = features(model, image)
    rows = [
        (image, feature, "image x"),
        (shifted, features(model, shifted), "shifted x"),
        (shifted, feature.roll((1, 2), (-2, -1)), "expected"),
    ]
    _rows(rows, path, "Translation: features of the image, of the shifted image, and the shifted features of the image")


def draw_element(model: nn.Module, image: Tensor, element: int, path: Path, what: str) -> None:
    """GE-ViT Fig. 5 and 6: the feature map of a moved image is the moved and permuted feature map."""
    moved = act(image, model.group, element)
    feature = features(model, image)
    rows = [
        (image, feature, "image x"),
        (moved, features(model, moved), f"{what} x"),
        (moved, act(feature, model.group, element), "expected"),
    ]
    title = f"features of the image, of the {what} image, and the {what} and permuted features of the image"
    _rows(rows, path, title[0].upper() + title[1:])


def draw_errors(models: dict[tuple[str, str], nn.Module], image: Tensor, path: Path) -> None:
    """GE-ViT Fig. 7, with one row a model and relation and one column a group element."""
    columns = max(len(moving_elements(model)) for model in models.values())
    figure, axes = plt.subplots(len(models), columns, squeeze=False, figsize=(1.6 * columns + 1, 2.0 * len(models)))
    for line, ((name, relation), model) in zip(axes, models.items(), strict=True):
        for axis in line:
            axis.axis("off")
        for axis, element in zip(line, moving_elements(model), strict=False):
            error, _ = error_map(model, image, element)
            axis.axis("on")
            _show(axis, error[0].mean((0, 1)), f"g = {element}: {error.mean():.0e}", vmin=0, vmax=0.3, cmap="magma")
        line[0].set_ylabel(f"{name}\n{relation}", fontsize=9)
    figure.suptitle("Equivariance error of the features (colour from 0 to 0.3; the number is the mean)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_all(models: dict[tuple[str, str], nn.Module], image: Tensor, folder: Path) -> None:
    """Every figure the trained models, by name and relation, allow."""
    with_group = {key: model for key, model in models.items() if len(model.group) > 1}
    if not with_group:
        return
    preferred = next(((k, m) for k, m in with_group.items() if k[1] == "ge_vit"), next(iter(with_group.items())))[1]
    draw_translation(preferred, image, folder / "translation.png")
    quarter = next((g for g in range(len(preferred.group)) if preferred.group.matrices[g].diagonal().eq(0).all()), None)
    if quarter is not None:
        draw_element(preferred, image, quarter, folder / "rotation.png", "rotated")
    for (_, relation), model in with_group.items():
        flips = [g for g in range(len(model.group)) if model.group.matrices[g].det() < 0 and model.group.lattice[g]]
        if flips and relation != "gsa":
            draw_element(model, image, flips[0], folder / "reflection.png", "reflected")
            break
    draw_errors(with_group, image, folder / "errors.png")


def draw_trained(settings: Settings, build: Callable[[Any], Learner], image: Tensor) -> None:
    """Every figure of the first trained network of each model and relation, from its checkpoint.

    Says which networks have none, or a damaged one.
    """
    models: dict[tuple[str, str], nn.Module] = {}
    missing: dict[tuple[str, str], str] = {}
    for run in settings.runs():
        key = run.models[0], run.relation[0]
        path = run.folder / ("best.ckpt" if run.data else "last.ckpt")
        if key in models:
            continue
        if not path.is_file():
            missing.setdefault(key, f"{path} is not there (--again trains once more)")
            continue
        learner = build(run)
        try:
            learner.load_state_dict(load(path)["state_dict"])
        except CheckpointError as error:
            missing.setdefault(key, str(error))
            continue
        models[key] = learner.model.eval()
    if missing := {key: reason for key, reason in missing.items() if key not in models}:
        names = ", ".join(" ".join(key) for key in missing)
        print(f"\nNo feature maps are drawn of {names}: {next(iter(missing.values()))}")
    if models:
        draw_all(models, image, settings.output / settings.STUDY)
