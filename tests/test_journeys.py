"""A newcomer gets from README to a trained model: few pages, each linked from the one before, and all names on them."""

import ast
import itertools
import re
import runpy
from pathlib import Path

import pytest
from hosts import HOSTS

ROOT = Path(__file__).parents[1]
JOURNEYS = sorted((ROOT / "tests" / "journeys").glob("*.py"))


def pages(script):
    """The pages that the newcomer read, in order."""
    (names,) = re.findall(r"^PAGES = (\[.*\])$", script.read_text(), re.MULTILINE)
    return ast.literal_eval(names)


def needed(script):
    """Names imported from this library, and arguments of their calls, also those collected in dictionaries."""
    tree = ast.parse(script.read_text())
    ours = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.module.startswith("tg_equiattn")]
    names = {alias.name for node in ours for alias in node.names}
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and getattr(x.func, "id", "") in names]
    keywords = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    settings = {key.value for x in ast.walk(tree) if isinstance(x, ast.Dict) for key in x.keys}
    return names | keywords | settings


@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_a_journey_takes_three_pages_each_linked_from_the_one_before(script):
    visited = pages(script)
    assert visited[0] == "README.md"
    assert len(visited) <= 3
    for page, following in itertools.pairwise(visited):
        links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
        assert (ROOT / following).resolve() in [(ROOT / page).parent.joinpath(link).resolve() for link in links]


@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_pages_of_a_journey_show_every_name_it_needs(script):
    text = "\n".join((ROOT / page).read_text() for page in pages(script))
    assert sorted(name for name in needed(script) if not re.search(rf"\b{name}\b", text)) == []


@pytest.mark.slow
@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_a_journey_ends_with_a_trained_equivariant_model(script):
    for integration, package in HOSTS.items():
        if f"integrations.{integration} " in script.read_text():
            pytest.importorskip(package)
    result = runpy.run_path(str(script))
    losses = result["LOSSES"]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert result["ERROR"] < 1e-4
