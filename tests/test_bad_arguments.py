"""Each argument of each public constructor gets values of a pool. It makes a module, or refuses the value by name.

Values that nobody can mean are refused: texts that are no choice, NaN, infinity, tensors, and empty lists. Values of a
million are given to real numbers alone, as sizes of a million take memory. A module of volumes has the constructor of
the module of images, so its arguments are skipped.
"""

import inspect
import math
import re
import warnings

import pytest
import torch
from argument_rows import CLASSES, public_class
from cases import CASES, Call, besides, einsums_as_written

from tg_equiattn import graphs, grids, groups

LARGE = 10**6
NEVER = "x", math.nan, math.inf, torch.zeros(2), [], (), {}
POOL = None, -1, 0, 1.5, True, object(), LARGE, *NEVER
SIZES = {"mlp_ratio"}  # real numbers that take memory
MAY_BE_EMPTY = {"pools", "attn_kwargs", "norm_kwargs"}


def problems(make, given):
    """Values of arguments that are accepted or refused without their name. Functions make a part for each call."""
    found = []
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for value in POOL:
            if value is LARGE and (not isinstance(parameter.default, float) or name in SIZES):
                continue
            parts = {n: x() if inspect.isfunction(x) else x for n, x in given.items()}
            try:
                made = make(**parts | {name: value})
            except (ValueError, TypeError) as error:
                if not re.search(rf"\b{name}\b", str(error)):
                    found.append(f"{name}={value!r}: {error}")
            except Exception as error:
                found.append(f"{name}={value!r}: {type(error).__name__}: {error}")
            else:
                never = any(value is x for x in NEVER) and not (name in MAY_BE_EMPTY and not len(value))
                found += [f"{name}={value!r} makes {made}"] if never else []
    return found


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("R3")])
def test_a_module_is_made_or_the_argument_is_named(name):
    kind, table, host = public_class(name)
    with warnings.catch_warnings(), einsums_as_written(host):
        warnings.simplefilter("ignore")
        assert problems(kind, table.arguments) == []


FUNCTIONS = [
    (grids.PixelGrid, {"shape": (4, 5)}),
    (grids.Window, {"dim": 2, "kernel_size": 3}),
    (graphs.neighbor_list, {"pos": torch.rand(3, 2), "cutoff": 1.0}),
    (groups.cyclic, {"n": 4}),
    (groups.dihedral, {"n": 4}),
    (groups.octahedral, {"reflections": True}),
    (groups.dyadic, {"scales": 2}),
]


@pytest.mark.parametrize(("function", "given"), FUNCTIONS)
def test_functions_that_modules_need_name_their_arguments(function, given):
    assert problems(function, given) == []


@pytest.mark.parametrize(("name", "given"), [("PixelGraph", {}), ("PeriodicRadiusGraph", {"cutoff": 1.0})])
def test_transforms_name_their_arguments(name, given):
    pyg = pytest.importorskip("torch_geometric") and pytest.importorskip("tg_equiattn.integrations.pyg")
    assert problems(getattr(pyg, name), given) == []


def test_problems_are_found():
    """Negative control."""

    def careless(size=1, rate=0.5):
        return [0.0] * size if rate < 1 else None

    found = problems(careless, {})
    assert "size='x': can't multiply sequence by non-int of type 'str'" in found
    assert "size=-1 makes []" not in found
    assert "rate=nan makes None" in found
    assert len(found) > 12


@pytest.mark.parametrize("name", besides([name for name, case in CASES.items() if case.host == "torch"]))
def test_inputs_of_two_devices_are_refused(name):
    """All but the first: where a layer has no parameters, the first input says which device it is."""
    pytest.importorskip(CASES[name].host)
    module, inputs = CASES[name].build(torch.float32)
    if isinstance(module, Call):
        return  # a function of parts that are made from its inputs
    for key in [key for key, x in inputs.items() if isinstance(x, torch.Tensor)][1:]:
        with pytest.raises(ValueError, match=r"must be on (cpu|meta) as"):
            module(**inputs | {key: inputs[key].to("meta")})
