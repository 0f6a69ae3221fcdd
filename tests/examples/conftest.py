"""Tests of the examples are slow but for those of the harness, the report and the quick starts."""

from importlib import import_module

import pytest

QUICK = ("test_harness", "test_report", "test_quickstarts")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "examples" and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def study(request):
    """The study that a file of tests is named after."""
    return import_module(request.path.stem.removeprefix("test_"))
