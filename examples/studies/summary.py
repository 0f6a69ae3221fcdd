"""The first tables of docs/results.md and docs/performance.md: rows for tasks, and for layers that are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from harness.results import Row
from harness.tables import cells, markdown

# The task, the table, what both rows hold, the column, ours, the best other, the settings of runs whose times are
# compared, and the notes.
TASKS = (
    ("Two of four patterns are equal: accuracy, %", "matching/accuracy", (), "4 cells",
     "relative, rotary", "deep G-CNN + mean", {"cells": [4]}, "results_escnn.md#find-the-pair"),
    ("Far digits: accuracy, %", "far_digits/accuracy", (), "accuracy",
     "global attention", "G-CNN + mean", {}, "results_escnn.md#far-digits"),
    ("Copied regions, rotated: F1 of pixels, %", "micrographs/f1", ("near", "30"), "pixels, rotated",
     "G-CNN + attention", "G-CNN + comparison", {"copies": ["near"], "epochs": 30},
     "results_escnn.md#copied-regions"),
    ("Rotated digits, C4, after 24 epochs: accuracy, %", "rotated_digits/frames", ("24", "0.02"), "accuracy",
     "R4_SA", "C4 G-CNN", {"epochs": 24, "learning_rate": 0.02}, "results_escnn.md#rotated-digits"),
    ("Digits rotated by any angle, after 15 minutes: accuracy, %", "vision_transformers/accuracy",
     ("MNIST's digits, 7,000", "15"), "test", "convolutions + frames C4", "G-CNN C4", {"data": "mnist"},
     "results_escnn.md#vision-transformers"),
    ("One attention layer in a G-CNN, digits: accuracy, %", "rotated_digits/mixed", (), "accuracy",
     "G-CNN + attention", "C4 G-CNN", {"channels": 9}, "results_escnn.md#attention-in-a-g-cnn"),
    ("Offset to a far node", "depots/displacement", (), "as trained",
     "far offsets, pairs", "dense, centred", {"tasks": ["displacement"]}, "results_pyg.md#far-nodes"),
    ("Offset to a far node, 4 times the nodes", "depots/displacement", (), "4 times the nodes",
     "far offsets, pairs", "dense, centred", {"tasks": ["displacement"]}, "results_pyg.md#far-nodes"),
    ("Direction of the nearest of three nodes: accuracy, %", "depots/nearest", (), "1 times the nodes",
     "far offsets", "dense, centred", {"tasks": ["nearest"]}, "results_pyg.md#the-nearest-of-three"),
    ("Direction of the nearest of three nodes, 6.25 times the nodes: accuracy, %", "depots/nearest", (),
     "6.25 times the nodes",
     "far offsets", "dense, centred", {"tasks": ["nearest"]}, "results_pyg.md#the-nearest-of-three"),
    ("Left or right, messages along near pairs: accuracy, %", "pyg_mixed_model/accuracy", ("near pairs",), "accuracy",
     "ours", "Performer", {"edges": ["near pairs"]}, "results_pyg.md#left-or-right"),
    ("Left or right, messages along touching pixels: accuracy, %", "pyg_mixed_model/accuracy", ("touching",),
     "accuracy",
     "ours", "Performer + positions", {"edges": ["touching"]}, "results_pyg.md#left-or-right"),
    ("Energies of Lennard-Jones molecules", "molecules/errors", ("pairs",), "energy",
     "ours, exact", "Performer", {"messages": ["pairs"]}, "results_pyg.md#molecules-without-bonds-between-near-atoms"),
    ("Forces on charges, twice the charges", "long_range/errors", ("forces",), "field or force, 2 times the charges",
     "EwaldAttention", "Ewald message passing", {"task": ["forces"]}, "results_e3nn.md#charges-far-apart"),
    ("Pushed proteins, longer chains", "proteins/response", ("128",), "larger, beyond 8 Å",
     "Ewald + Hyena", "distance attention", {"epochs": 128}, "results_e3nn.md#pushed-residues"),
    ("Potentials around proteins, larger ones", "surfaces/errors", (), "larger",
     "Ewald (e3nn), no messages", "messages, potentials", {},
     "results_e3nn.md#potentials-around-proteins"),
    ("Drag on residues, longer chains", "proteins/drag", (), "larger",
     "Ewald", "messages", {"tasks": ["drag"]}, "results_e3nn.md#drag-on-residues"),
    ("Recall from 256 tokens", "associative_recall/errors", ("random",), "256 tokens",
     "SE(3)-Hyena", "SE(3)-Transformer", {"lengths": [256], "vocabulary": ["random"]},
     "results_e3nn.md#associative-recall"),
    ("Five charged particles", "nbody/errors", (), "MSE",
     "SE(3)-Hyena + local", "local only", {"epochs": 100}, "results_e3nn.md#charged-particles"),
    ("Force from the history of a motion, 4 times the steps", "memory/forces", (), "4 x length",
     "exponentials", "equivariant transformer", {"tasks": ["forces"]}, "results_e3nn.md#responses-with-a-memory"),
    ("Stress from the history of strain, 4 times the steps", "memory/stresses", (), "4 x length",
     "exponentials", "equivariant GRU", {"tasks": ["stresses"]}, "results_e3nn.md#responses-with-a-memory"),
    ("Net force between distant fragments, meV/A", "ion_pairs/pairs", ("ions and molecules", "0.02"), "net force",
     "predicted", "MACE", {"sets": ["pairs"], "learning_rate": 0.02},
     "results_mace.md#ions-and-molecules-at-large-distances"),
    ("Forces in 512 atoms of MgO, beside these charges by hand, meV/A", "polar_crystals/phonons", ("MgO",), "512 atoms",
     "charges", "torch-pme", {"crystals": ["MgO"], "learning_rate": 0.06, "cutoff": 5.0, "layers": 2},
     "results_mace.md#polar-crystals"),
    ("Forces in 512 atoms of MgO, beside MACE alone, meV/A", "polar_crystals/phonons", ("MgO",), "512 atoms",
     "charges", "MACE", {"crystals": ["MgO"], "learning_rate": 0.06, "cutoff": 5.0, "layers": 2},
     "results_mace.md#polar-crystals"),
)  # fmt: skip
NAMES = {
    "relative, rotary": "attention, relative",
    "R4_SA": "attention, frames",
    "convolutions + frames C4": "convolutions, then a transformer of frames",
    "G-CNN C4": "C4 G-CNN",
    "far offsets, pairs": "RelativeGPSBlock, pairs",
    "far offsets": "RelativeGPSBlock, features",
    "dense, centred": "GPSConv, centred positions",
    "ours": "RelativePerformerConv",
    "ours, exact": "RelativePerformerConv, pairs",
    "Performer": "GPSConv, Performer",
    "Performer + positions": "GPSConv, Performer with positions",
    "SE(3)-Hyena + local": "SE(3)-Hyena and messages",
    "local only": "messages",
    "exponentials": "SE(3)-Hyena, exponential filters",
    "predicted": "MACE, predicted charges",
    "charges": "MACE, given charges",
    "torch-pme": "these charges by hand, with torch-pme",
}


TIMES = "\N{MULTIPLICATION SIGN}"
# What is replaced, by what, and the row of a benchmark, whose last columns are the ratios
COSTS = (
    ("`R2Conv`, 5 x 5, C8, 32 x 32 pixels", "`R2GroupAttention` in a window", "defaults",
     "R2GroupAttention, C8, 32 x 32"),
    ("`R2Conv`, 5 x 5, C4, 16 x 16 pixels", "`R2GroupAttention` over all pixels, `relation=\"relative\"`", "calls",
     "R2GroupAttention, all pixels, relative, C4, 16 x 16"),
    ("timm's `Block`, width 768", "`FrameTransformerBlock`, D4", "transformers", "D4 | 768"),
    ("`GPSConv`, softmax, 16 graphs of 200 nodes", "`RelativeGPSBlock`, far offsets", "calls",
     "RelativeGPSBlock, far offsets, 16 of 200"),
    ("messages of e3nn, 16 clouds of 200 nodes", "`IrrepsEwaldAttention`", "calls",
     "IrrepsEwaldAttention, 2 + 2 kernels, 16 of 200"),
    ("messages of e3nn, 16 chains of 200 tokens", "two layers of `IrrepsSE3Hyena`", "calls",
     "IrrepsSE3Hyena, exponential, 2 layers, 16 of 200"),
)  # fmt: skip


def costs(tables: dict[str, str]) -> str:
    """Times of a layer as multiples of those of the layer that it replaces, forward and training."""
    lines = []
    for replaced, ours, table, words in COSTS:
        (row,) = [row for row in tables[f"benchmarks/{table}"].splitlines() if row.startswith(f"| {words} |")]
        numbers = row.strip("| ").split(" | ")
        forward, training = (numbers[4], numbers[6]) if table == "transformers" else (numbers[3], numbers[5])
        lines.append([replaced, ours, f"{forward} {TIMES}", f"{training} {TIMES}"])
    return markdown(("I replace", "by", "forward", "training"), lines)


def seconds(rows: Iterable[Row], model: str, settings: dict) -> float:
    """The shortest training of a model with these settings: on shared machines, the least disturbed."""
    names = ("models", "operators")
    of_model = [row for row in rows if any(row.settings.get(name) == [model] for name in names)]
    return min(row.seconds for row in of_model if settings.items() <= row.settings.items())


def bold(means: list[str], more_is_better: bool) -> list[str]:
    """The better of two cells in bold, both if they are equal."""
    values = [float(mean.split()[0]) for mean in means]
    best = max(values) if more_is_better else min(values)
    return [f"**{mean}**" if value == best else mean for mean, value in zip(means, values, strict=True)]


def summary(tables: dict[str, str], rows_of: Callable[[str], list[Row]]) -> str:
    lines = []
    for task, table, words, column, ours, other, settings, notes in TASKS:
        rows = rows_of(table.partition("/")[0])
        names = [name.split(" | ") for name in (ours, other)]  # of the model, and further cells of its row
        means = bold([cells(tables[table], *words, *name)[column] for name in names], task.endswith("%"))
        models = [NAMES.get(name[0], name[0]) for name in names]
        times = [seconds(rows, name[0], settings) for name in names]
        found = [f"{mean} ({model})" for mean, model in zip(means, models, strict=True)]
        lines.append([task, *found, f"{times[0] / times[1]:.1f} {TIMES}", f"[notes]({notes})"])
    return markdown(("task", "ours", "best other", "time", "more"), lines)
