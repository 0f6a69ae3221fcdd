"""Tests of functions take few numbers, for which a CPU would run definitions: here they reach the operators."""

import pytest


@pytest.fixture(autouse=True)
def operators_for_few_numbers(monkeypatch):
    monkeypatch.setattr("tg_equiattn.functional.operators.FEW_NUMBERS", 0)
