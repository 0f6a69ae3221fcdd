"""Fixtures and helpers shared by all tests."""

import contextlib
import gc

import numpy as np
import pytest
import torch
from cases import CASES
from devices import DEVICES
from hosts import missing_packages


@pytest.fixture(autouse=True)
def _alike():
    """Every test starts alike; one that leaves another default dtype behind fails, and the next does not notice."""
    torch.manual_seed(0)
    np.random.seed(0)  # escnn looks for changes of basis from a random start
    before = torch.get_default_dtype()
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(before)
    assert left == before, f"the test left {left} as the default dtype, it found {before}"


@pytest.fixture
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class WithoutPackages(pytest.Collector):
    """In place of tests whose packages are not installed: one test that is skipped and names the packages."""

    def collect(self):
        yield SkippedTests.from_parent(self, name="all tests")


class SkippedTests(pytest.Item):
    def runtest(self):
        pytest.skip(f"not installed: {', '.join(missing_packages(self.path))}")


def without_packages(path, parent):
    return WithoutPackages.from_parent(parent, name=path.name, path=path) if missing_packages(path) else None


def pytest_collect_directory(path, parent):
    return without_packages(path, parent)


def pytest_pycollect_makemodule(module_path, parent):
    return without_packages(module_path, parent)


def pytest_collection_modifyitems(items):
    """Tests on a device are marked, for ``make test-cuda``."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")


def pytest_collection_finish():
    """The garbage collector need not search modules and tests, which stay to the end: it takes a tenth of the time."""
    gc.freeze()


def pytest_unconfigure():
    """Libraries report objects as leaked that are still frozen when Python ends."""
    gc.unfreeze()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=CASES)
def case(request):
    pytest.importorskip(CASES[request.param].host)
    return CASES[request.param]


@pytest.fixture
def on_device(device):
    """A device on which everything is made that the test makes; to be its first argument, before other fixtures."""
    with contextlib.nullcontext() if device == "cpu" else torch.device(device):
        yield device


@pytest.fixture
def randomise():
    """Give every parameter of a module random values, so that no zero hides an error."""

    def fill(module, std=0.7):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=std)
        return module

    return fill


@pytest.fixture
def operators_for_few_numbers(monkeypatch):
    """A CPU runs definitions for the few numbers of these tests: with this fixture they reach the operators."""
    monkeypatch.setattr("tg_equiattn.operators.FEW_NUMBERS", 0)
