"""Tests of the examples are slow but for those of the harness, the report and the quick starts."""

import pytest

QUICK = ("test_harness", "test_report", "test_quickstarts")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "examples" and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)
