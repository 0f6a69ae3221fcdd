"""Rebuild tables from the result rows that come with the project, in examples/results.

Every study's rows are in examples/results/NAME/results.csv, one a training run, written by `examples/NAME.py --study`.
This writes the tables beside them, and the tables that stand between `<!-- NAME/TABLE -->` and `<!-- end -->` in
README.md and in the pages of docs/; benchmarks' are in examples/results/benchmarks, as they were printed. Nothing is
trained.

    python examples/studies/report.py
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

from harness import results, study
from harness.settings import EXAMPLES, Settings
from harness.tables import check_cells
from summary import costs, summary

ROOT = EXAMPLES.parent
STUDIES = (
    "rotated_digits", "pixel_graphs", "nbody", "associative_recall", "pyg_mixed_model", "long_range", "molecules",
    "far_digits", "matching", "depots", "real_molecules", "proteins", "polar_crystals", "ion_pairs",
    "surfaces", "micrographs", "memory", "vision_transformers",
)  # fmt: skip


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


def rows_of(name: str) -> list[results.Row]:
    return results.read(study.committed(name), kind_of(importlib.import_module(name)))


def build(name: str) -> dict[str, str]:
    """One study's tables by name."""
    module, rows = importlib.import_module(name), rows_of(name)
    check_cells(rows, kind_of(module))
    return module.report(rows)


def tables() -> dict[str, str]:
    """The tables of all studies and benchmarks, by NAME/TABLE; those of studies are written beside their rows."""
    records = sorted((EXAMPLES / "results" / "benchmarks").glob("*.md"))
    found = {f"benchmarks/{record.stem}": record.read_text().strip() for record in records}
    for name in STUDIES:
        for title, table in build(name).items():
            study.committed(name).with_name(f"{title}.md").write_text(table + "\n")
            found[f"{name}/{title}"] = table
    found |= {"summary/tasks": summary(found, rows_of), "summary/costs": costs(found)}
    for title in ("tasks", "costs"):
        (EXAMPLES / "results" / "summary" / f"{title}.md").write_text(found[f"summary/{title}"] + "\n")
    return found


def main() -> None:
    found = tables()
    for page in pages():
        text = page.read_text()
        for name, table in found.items():
            text = filled(text, name, table)
        page.write_text(text)
    print(f"{len(found)} tables, from the rows of {', '.join(STUDIES)}")


if __name__ == "__main__":
    main()
