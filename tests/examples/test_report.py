"""Tables in the README and beside the result rows are what the committed rows say."""

import re
import shlex
from importlib import import_module

import pytest
from running import EXAMPLES

WITH_ROWS = sorted(path.parent.name for path in (EXAMPLES / "results").glob("*/results.csv"))


@pytest.fixture(scope="module")
def report():
    return import_module("report")


@pytest.mark.parametrize("name", WITH_ROWS)
def test_tables_and_commands_are_what_the_rows_say(report, tmp_path, name):
    from harness import results, study
    from harness.settings import parse

    before = report.README.read_text()
    tables, after = report.build(name, before, tmp_path)
    assert after == before
    for title, table in tables.items():
        assert study.committed(name).with_name(f"{title}.md").read_text() == table + "\n"
    figures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert figures == sorted(path.name for path in study.committed(name).parent.glob("*.png"))
    module = import_module(name)
    kind = report.kind_of(module)
    for row in results.read(study.committed(name)):
        repeated = parse(kind(), module.PRESETS, "", shlex.split(row.command)[2:])
        assert repeated.identity() == kind().identity() | row.settings
        assert row.value == row.value  # a number
        assert row.parameters > 0
    assert all("python examples/studies/" in line for line in tables["commands"].splitlines()[2:])


STUDY_LINES = re.findall(r"examples/studies/(\w+)\.py (--study.*)", (EXAMPLES.parent / "Makefile").read_text())


@pytest.mark.parametrize(("name", "flags"), STUDY_LINES, ids=[" ".join(line) for line in STUDY_LINES])
def test_make_studies_finds_all_its_rows(report, name, flags):
    from harness import results, study
    from harness.settings import parse

    module = import_module(name)
    runs = list(parse(report.kind_of(module)(), module.PRESETS, "", shlex.split(flags)).runs())
    rows = results.read(study.committed(name))
    assert not [run.folder.name for run in runs if results.find(rows, run) is None]


def test_every_study_is_in_make_studies(report):
    assert {name for name, _ in STUDY_LINES} == set(report.STUDIES)


def test_every_place_in_the_readme_belongs_to_a_study(report):
    places = [line for line in report.README.read_text().splitlines() if line.startswith("<!-- ")]
    names = [line.split()[1].split("/")[0] for line in places if line != "<!-- end -->"]
    assert len(names) == places.count("<!-- end -->")
    assert set(names) <= set(report.STUDIES)
    assert set(WITH_ROWS) <= set(report.STUDIES)


def test_a_table_is_put_in_its_place_only(report):
    text = "a\n<!-- x/y -->\n\nold\n\n<!-- end -->\nb\n<!-- x/z -->\n\nkept\n\n<!-- end -->\n"
    wanted = "a\n<!-- x/y -->\n\n| new |\n\n<!-- end -->\nb\n<!-- x/z -->\n\nkept\n\n<!-- end -->\n"
    assert report.filled(text, "x/y", "| new |") == wanted
    assert report.filled(text, "x/other", "| new |") == text


def test_rows_that_would_share_a_cell_are_refused(report):
    import dataclasses

    from harness import results, study
    from harness.tables import check_cells

    rows = results.read(study.committed("e3nn_mixed_model"))
    kind = report.kind_of(import_module("e3nn_mixed_model"))
    check_cells(rows, kind)
    other = dataclasses.replace(rows[0], settings=rows[0].settings | {"seeds": [7], "train": 5})
    with pytest.raises(ValueError, match=r"rows of none differ in train: \d+, 5"):
        check_cells([*rows, other], kind)


def test_one_command_for_several_seeds(report):
    from harness import results, study
    from harness.tables import command_of

    rows = [row for row in results.read(study.committed("e3nn_mixed_model")) if row.setting("operators") == "none"]
    assert len(rows) == 3
    kind = report.kind_of(import_module("e3nn_mixed_model"))
    assert "--operators none --task chain" in command_of(rows, kind)
    assert "--seeds 0 1 2" in command_of(rows, kind)


def test_figures_in_the_readme_are_there(report):
    figures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", report.README.read_text())
    assert len(figures) >= 3
    assert all((report.README.parent / figure).is_file() for figure in figures)
