"""The form in which an operator runs: eagerly, compiled and exported."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tg_equiattn.functional.backend import DEFINITION, OPERATOR, choose_form

FORMS = [DEFINITION, OPERATOR]


class Form(torch.nn.Module):
    """Returns as many numbers as the place of the form in FORMS says."""

    def forward(self, x):
        return x.new_zeros(FORMS.index(choose_form(x, 1000)))


def compiled(module):
    return torch.compile(module, backend="eager", fullgraph=True)


def exported(module):
    return torch.export.export(module, (torch.zeros(3, device="meta"),)).module()


@pytest.mark.parametrize(
    ("how", "device", "wanted"),
    [
        (lambda module: module, "cpu", OPERATOR),
        (lambda module: module, "meta", OPERATOR),
        (compiled, "cpu", OPERATOR),
        (compiled, "meta", DEFINITION),  # an accelerator, which takes what compilers fuse
        (exported, "meta", OPERATOR),
        (torch.func.vmap, "cpu", DEFINITION),
    ],
)
def test_the_form_of_an_operator(how, device, wanted):
    x = torch.zeros(1, 3, device=device)
    found = how(Form())(x if how is torch.func.vmap else x[0])
    assert FORMS[found.shape[-1]] == wanted


def test_few_numbers_on_a_cpu_run_as_the_definition(monkeypatch):
    """Not where tracers and dispatch modes record operations."""
    monkeypatch.setattr("tg_equiattn.functional.backend.FEW_NUMBERS", 1 << 13)
    x = torch.zeros(3)
    assert choose_form(x, 1000, few=True) == DEFINITION
    assert choose_form(x, 1 << 20, few=True) == choose_form(x, 1000) == OPERATOR
    with FlopCounterMode(display=False):
        assert choose_form(x, 1000, few=True) == OPERATOR
    torch.jit.trace(lambda x: x + FORMS.index(seen(choose_form(x, 1000, few=True))), x, check_trace=False)


def seen(form):
    assert form == OPERATOR
    return form


def test_what_does_not_fit_into_a_tile_runs_as_the_operator():
    run = compiled(lambda x: x.new_zeros(FORMS.index(choose_form(x, 1 << 40))))
    assert FORMS[len(run(torch.zeros(3, device="meta")))] == OPERATOR
