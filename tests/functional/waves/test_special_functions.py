"""Boys functions: their values and their derivatives of all orders."""

import torch

from tg_equiattn.functional.waves.special_functions import boys_functions


def test_boys_functions():
    """By quadrature, at 0 and far from it; derivatives are the next ones, of all orders."""
    t = torch.tensor([0.0, 1e-9, 0.3, 1.4, 1.6, 5.0, 40.0, 900.0], dtype=torch.float64)
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for lmax in (0, 1, 4):
        found = boys_functions(t, lmax)
        for degree in range(lmax + 1):
            wanted = (u ** (2 * degree) * (-t[:, None] * u**2).exp()).mean(1)
            torch.testing.assert_close(found[degree], wanted, rtol=1e-8, atol=0)
            single = boys_functions(t.float(), lmax)[degree].double()
            torch.testing.assert_close(single, wanted, rtol=1e-6, atol=0)
    assert torch.autograd.gradcheck(lambda t: boys_functions(t.abs(), 2), (t[2:7].clone().requires_grad_(),))
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value = boys_functions(x, 1)[1].sum()
    for order in range(1, 4):
        (value,) = torch.autograd.grad(value, x, create_graph=True)
        torch.testing.assert_close(value.item(), (-1) ** order / (3 + 2 * order), rtol=1e-12, atol=0)
