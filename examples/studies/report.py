"""Rebuild tables from the result rows that come with the project, in examples/results.

Every study's rows are in examples/results/NAME/results.csv, one a training run, written by `examples/NAME.py --study`.
This writes the tables beside them, and the tables
that stand between `<!-- NAME/TABLE -->` and `<!-- end -->` in README.md and in the pages of docs/; benchmarks' are
in examples/results/benchmarks, as they were printed. Nothing is trained.

    python examples/studies/report.py                  # all studies
    python examples/studies/report.py nbody            # one
    python examples/studies/report.py --check          # change nothing; fail where a table is not what the rows say
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import tyro
from harness import front_page, results, study
from harness.settings import EXAMPLES, Settings
from harness.tables import check_cells

ROOT = EXAMPLES.parent
STUDIES = (
    "rotated_digits", "pixel_graphs", "nbody", "associative_recall", "pyg_mixed_model",
    "long_range", "molecules", "far_digits", "matching", "depots", "real_molecules",
    "proteins", "polar_crystals",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What to rebuild."""

    studies: Annotated[tuple[str, ...], tyro.conf.Positional] = STUDIES
    """names of examples; default: all"""
    check: bool = False
    """change nothing, fail where something would change"""


def kind_of(module: ModuleType) -> type[Settings]:
    """The settings of an example."""
    return type(next(iter(module.PRESETS.values())))


def pages() -> list[Path]:
    """README.md and what docs/ holds in Markdown, but for what is built there."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", *(p for p in sorted(docs.rglob("*.md")) if "_build" not in p.relative_to(docs).parts)]


def filled(text: str, name: str, table: str) -> str:
    """A page's text with this table in its places, where it has any."""
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
    return place.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


def build(name: str) -> dict[str, str]:
    """One study's tables by name."""
    module = importlib.import_module(name)
    kind = kind_of(module)
    rows = results.latest(results.read(study.committed(name)), kind)
    check_cells(rows, kind)
    return module.report(rows)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    with study.refusing():
        unknown = [name for name in options.studies if name not in STUDIES]
        if unknown:
            raise ValueError(f"studies must be among {', '.join(STUDIES)}, got {', '.join(unknown)}")
    texts = {path: path.read_text() for path in pages()}  # by file, what it must hold
    for record in sorted((EXAMPLES / "results" / "benchmarks").glob("*.md")):
        texts |= {
            path: filled(text, f"benchmarks/{record.stem}", record.read_text().strip()) for path, text in texts.items()
        }
    for name in options.studies:
        place = study.committed(name)
        if not place.is_file():
            print(f"{name}: no rows yet; `python examples/studies/{name}.py --study` makes them")
            continue
        tables = build(name)
        for title, table in tables.items():
            texts |= {path: filled(text, f"{name}/{title}", table) for path, text in texts.items()}
            texts[place.with_name(f"{title}.md")] = table + "\n"
        print(f"{name}: {', '.join(tables)}")
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    if options.check and stale:
        sys.exit(f"not what the rows say (run `make report`): {', '.join(map(str, stale))}")
    for path in stale:
        path.write_text(texts[path])
    if not options.check:
        figure = ROOT / "docs" / "_static" / "front_page.png"
        figure.parent.mkdir(parents=True, exist_ok=True)
        front_page.draw(figure)


if __name__ == "__main__":
    main()
