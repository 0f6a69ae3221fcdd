"""Images of these tests are small: without this fixture, few would reach the tiles of windows."""

import pytest


@pytest.fixture(autouse=True)
def _tiles(operators_for_few_numbers):
    pass
