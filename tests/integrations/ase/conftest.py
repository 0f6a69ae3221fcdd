"""MACE and NequIP, whichever is installed, and their calculators for ASE."""

import importlib

import pytest
from hosts import missing


@pytest.fixture(params=["mace", "nequip"])
def host(request):
    if missing(request.param):
        pytest.skip(f"{request.param} is not installed")
    return importlib.import_module(f"{request.param}_models")


@pytest.fixture
def calculator(host):
    def calculator(model):
        if host.__name__ == "mace_models":
            from tg_equiattn.integrations.mace import LongRangeCalculator

            return LongRangeCalculator(models=model, default_dtype="float64")
        from nequip.integrations.ase import NequIPCalculator

        return NequIPCalculator(model, "cpu", transforms=host.transforms())

    return calculator
