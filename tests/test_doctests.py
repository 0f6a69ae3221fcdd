import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from hosts import HOSTS

import tg_equiattn
from tg_equiattn import integrations

CORE = [m.name for m in pkgutil.walk_packages(tg_equiattn.__path__, "tg_equiattn.") if "integrations" not in m.name]
HOSTED = {
    f"tg_equiattn.integrations.{extra}.{module.name}": host
    for extra, host in HOSTS.items()
    for place in integrations.__path__
    for module in pkgutil.iter_modules([f"{place}/{extra}"])
}


@pytest.mark.parametrize("name", [*CORE, *HOSTED])
def test_examples_in_docstrings(name):
    """They run, and fit on a page of the site, where a line has 100 characters."""
    pytest.importorskip(HOSTED.get(name, "torch"))
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
    examples = [example for test in doctest.DocTestFinder().find(module) for example in test.examples]
    assert [line for example in examples for line in example.source.splitlines() if len(line) > 96] == []


PAGE = Path(__file__).parents[1] / "docs" / "concepts.md"
SESSIONS = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("session", SESSIONS)
def test_examples_by_hand_on_the_page_of_concepts(session):
    example = doctest.DocTestParser().get_doctest(session, {}, PAGE.name, None, None)
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0
