"""Whatever changes the function is in the checkpoint, for every constructor argument of every public module.

:mod:`argument_rows` has rows of values of one argument. Two modules that differ in these values alone refuse each
other's state. If the row has a reason why not, each loads the other's state and has its outputs in eval mode.
"""

import itertools

import pytest
import torch
from argument_rows import CLASSES, Table, equal, public_class, refused
from cases import besides, einsums_as_written
from torch.utils._pytree import tree_leaves

from tg_equiattn.modules import StoresSettings


def refusal(module, state):
    try:
        module.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def differ(one, other, inputs, tolerance):
    with torch.no_grad():
        outs = [[getattr(x, "tensor", x) for x in tree_leaves(module(**inputs))] for module in (one, other)]
        return any(not (a - b).abs().max() <= tolerance * a.abs().max() for a, b in zip(*outs, strict=True))


def problems(kind, table):
    """Pairs of modules whose states load against their row, or do not load."""
    found, made = [f"{name}: no row, or no argument" for name in table.missing(kind)], {}
    for key, row in table.rows_for(kind).items():
        argument = key.split(":")[0]
        modules = [table.make(kind, argument, value, row.others, made) for value in row.values]
        for module in modules:
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
            if said := refusal(module, module.state_dict()):
                found.append(f"{key}: refuses its own state: {said}")
        for (value, module), (_, other) in itertools.permutations(zip(row.values, modules, strict=True), 2):
            said = refusal(other, module.state_dict())
            if bool(said) == bool(row.loads):
                found.append(f"{key}: {value} {said or 'loads'}")
            elif row.loads and differ(module, other, table.inputs(), row.tolerance):
                found.append(f"{key}: {value} has other outputs")
    return found


# those of volumes are those of images, and these have the settings of EwaldAttention or AtomsEwaldAttention
SLOW = {name for name in CLASSES if name.startswith("R3")} | {"pyg.EwaldAttention", "IrrepsEwaldAttention"}


@pytest.mark.filterwarnings("ignore:relation='gsa'", "ignore:method='pairs' is exact")
@pytest.mark.parametrize("name", besides({*CLASSES} - SLOW, CLASSES))
def test_what_changes_the_function_is_in_the_checkpoint(name, double):
    kind, table, host = public_class(name)
    with einsums_as_written(host):
        assert problems(kind, table) == []


class Scaled(torch.nn.Module):
    """A module whose state says nothing of its argument."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor, self.weight = factor, torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.factor * self.weight * x


class Stored(StoresSettings, Scaled):
    def settings(self):
        return {"factor": self.factor}


class StoredMore(Stored):
    def settings(self):
        return super().settings() | {"more": 1}


def test_a_class_with_more_settings_is_another_function():
    for one, other in itertools.permutations((Stored(), StoredMore())):
        assert "with more=" in refusal(one, other.state_dict())


def test_a_setting_that_is_not_stored_is_found():
    """Negative control: a state without the argument, outputs that differ, an argument without a row."""

    def found(kind, **rows):
        return problems(kind, Table({}, lambda: {"x": torch.ones(3)}, rows))

    assert found(Stored, factor=refused(1.0, 2.0, [1.0, 2.0], [1.0, 3.0])) == []
    assert found(Scaled, factor=refused(1.0, 2.0)) == ["factor: 1.0 loads", "factor: 2.0 loads"]
    assert len(found(Scaled, factor=equal("no reason", 1.0, 2.0))) == 2
    assert len(found(Stored, factor=equal("no reason", 1.0, 2.0))) == 2
    assert found(Scaled) == ["factor: no row, or no argument"]
