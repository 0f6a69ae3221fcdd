"""Tables in the README, in the docs and beside the result rows are what the committed rows say."""

import dataclasses
import functools
import importlib.util
import re
import shlex
from importlib import import_module

import pytest
import report
from harness import results, study
from harness.settings import parse
from harness.tables import check_cells
from running import EXAMPLES

WITH_ROWS = sorted(path.parent.name for path in (EXAMPLES / "results").glob("*/results.csv"))


@pytest.mark.parametrize("name", WITH_ROWS)
def test_tables_and_commands_are_what_the_rows_say(name):
    """Commands that differ in their seed alone are read once."""
    tables = report.build(name)
    for title, table in tables.items():
        for page in report.pages():
            assert report.filled(page.read_text(), f"{name}/{title}", table) == page.read_text()
        assert study.committed(name).with_name(f"{title}.md").read_text() == table + "\n"
    module = import_module(name)
    kind = report.kind_of(module)
    repeat = functools.cache(lambda command: parse(kind(), module.PRESETS, "", shlex.split(command)[2:]))
    for row in results.read(study.committed(name), kind):
        command, *seeds = re.split(r" --seeds (\d+)(?= |$)", row.command)
        command, seed = command + "".join(seeds[1:]), tuple(map(int, seeds[:1])) or kind().seeds
        assert dataclasses.replace(repeat(command), seeds=seed).identity() == row.settings
        assert row.value == row.value  # a number
        assert row.parameters >= 0  # a reference has none


def test_every_place_in_a_page_belongs_to_a_table():
    assert set(WITH_ROWS) <= set(report.STUDIES)
    for page in report.pages():
        places = re.findall(r"^<!-- (?:(\w+)/(\w+)|end) -->$", page.read_text(), re.MULTILINE)
        assert all(place[0] for place in places[::2])
        assert places[1::2] == len(places[::2]) * [("", "")]
        for name, title in places[::2]:
            assert name in (*report.STUDIES, "benchmarks", "summary")
            assert (EXAMPLES / "results" / name / f"{title}.md").is_file()


@pytest.mark.parametrize(
    "record", sorted((EXAMPLES / "results" / "benchmarks").glob("*.md")), ids=lambda path: path.stem
)
def test_tables_of_benchmarks_are_their_records(record):
    for page in report.pages():
        text = page.read_text()
        assert report.filled(text, f"benchmarks/{record.stem}", record.read_text().strip()) == text


@pytest.mark.parametrize(("title", "page"), [("tasks", "results"), ("costs", "performance")])
def test_the_first_tables_are_what_the_others_say(title, page):
    folder = EXAMPLES / "results" / "benchmarks"
    tables = {f"{name}/{title}": table for name in report.STUDIES for title, table in report.build(name).items()}
    tables |= {f"benchmarks/{path.stem}": path.read_text().strip() for path in folder.glob("*.md")}
    table = report.summary(tables, report.rows_of) if title == "tasks" else report.costs(tables)
    text = (EXAMPLES.parent / "docs" / f"{page}.md").read_text()
    assert f"<!-- summary/{title} -->" in text
    assert report.filled(text, f"summary/{title}", table) == text
    assert (EXAMPLES / "results" / "summary" / f"{title}.md").read_text() == table + "\n"


def test_rows_that_would_share_a_cell_are_refused():
    kind = report.kind_of(import_module("nbody"))
    rows = results.read(study.committed("nbody"), kind)
    check_cells(rows, kind)
    other = dataclasses.replace(rows[0], settings=rows[0].settings | {"seeds": [7], "train": 5})
    with pytest.raises(ValueError, match=r"rows of .* differ in train: \d+, 5"):
        check_cells([*rows, other], kind)


def test_the_front_page_is_drawn_from_the_tables(tmp_path):
    spec = importlib.util.spec_from_file_location("front_page", EXAMPLES.parent / "docs" / "front_page.py")
    front_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(front_page)
    assert front_page.number(front_page.cells("matching/accuracy", "frames")["4 cells"]) == 90.1
    front_page.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
