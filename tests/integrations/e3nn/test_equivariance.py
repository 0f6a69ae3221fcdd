"""e3nn's checker on every module: rotations, reflections and, where positions enter, translations."""

import pytest
import torch
import torch.nn.functional as F
from e3nn import o3
from e3nn.util.test import assert_equivariant
from tg_equiattn.integrations.e3nn import (
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    TensorProductHyenaOperator,
)

SIZES = 7, 1, 11
IRREPS = {
    "repeated": ("3x0o+2x1e+4x0e+3x1o+1x0e", "2x1o+1x0e+3x0o+1x1o+2x1e", "3x0o+2x1e+4x0e+3x1o+1x0e"),
    "odd scalars": ("3x0o+2x1e", "5x0e+2x1o+3x0o", "2x0e+3x1o+2x1e+1x0o"),
}
OTHERS = ["radial", "model", "implicit", "attention", "hyena, alone"]  # the last without positions
OF_PRODUCTS = {
    "tensor": [("2x0e+1x1o+1x2e", "1x2e+2x0e+1x1o", None)],
    "tensor radial": [
        ("1x1o+3x0e+1x1o+1x3o", "1x3o+2x2e", "2x0e+1x1o+1x2e+1x3o"),
        ("2x0o+1x1e+2x0e", "2x0e+1x1e+1x0o", None),
    ],
}
KINDS = [("hyena", irreps) for irreps in IRREPS.values()]
KINDS += [(kind, IRREPS["repeated"]) for kind in OTHERS]
KINDS += [(kind, irreps) for kind, choices in OF_PRODUCTS.items() for irreps in choices]


@pytest.mark.parametrize(("kind", "irreps"), KINDS)
def test_operators(kind, irreps, default_dtype, device, make_module, graphs, check_equivariant):
    module = make_module(kind.removesuffix(", alone"), *irreps).to(device)
    given, of = graphs(module, SIZES, device), {"x": irreps[0], "pos": "cartesian_points"}
    moving = {name: given[name] for name in of if name in given and not (name == "pos" and "alone" in kind)}
    fixed = {name: given[name] for name in given if name not in of}
    call = lambda *tensors: module(**dict(zip(moving, tensors, strict=True)), **fixed)  # noqa: E731
    check_equivariant(call, list(moving.values()), [of[name] for name in moving], irreps[1])


@pytest.mark.parametrize(("claimed", "parity_only"), [("3x0e+2x1e", True), ("3x0o+2x1o", True), ("9x0e", False)])
def test_wrong_labels_are_seen(claimed, parity_only, default_dtype, randomise, graphs):
    inside = "3x0e+2x1o"
    module = randomise(IrrepsSE3HyenaOperator(inside, inside))
    x, pos, batch = graphs(module, SIZES).values()

    def check(irreps_out, **options):
        irreps_in = [inside, "cartesian_points"]
        assert_equivariant(lambda x, pos: module(x, pos, batch).detach(), [x, pos], irreps_in, irreps_out, **options)

    check(inside)
    with pytest.raises(AssertionError, match="equivariance error was too large"):
        check(claimed)
    if parity_only:
        check(claimed, do_parity=False)


@pytest.mark.parametrize("hidden", ["2x0o+3x1e", "2x1o+1x1e", "2x2e"])
def test_tensor_product_hyena_without_scalars(hidden, double, randomise):
    module = randomise(TensorProductHyenaOperator(hidden, hidden))
    assert_equivariant(lambda x: module(x), irreps_in=[module.irreps_in], irreps_out=[module.irreps_out])
    assert module(module.irreps_in.randn(7, -1)).abs().max() > 1e-6


@pytest.mark.parametrize(
    "kind", ["hyena", "implicit", "radial", "model", "attention", "tensor", "tensor radial", "ewald"]
)
def test_cross_products_tell_mirror_images_apart(kind, double, make_module):
    """The cross product of two steps, given as a polar vector; rotations act on it as on every vector."""
    hidden = () if kind == "ewald" else ("4x0e+4x1o",)
    module, kinds, pos = make_module(kind, "4x0e+2x1o", "3x0e", *hidden), torch.randn(14, 4), torch.randn(14, 3)

    def evaluate(pos, handed=True):
        before, after = (F.pad(pos.diff(dim=0), ends) for ends in ((0, 0, 1, 0), (0, 0, 0, 1)))
        second = torch.linalg.cross(before, after) if handed else before
        return module(torch.cat([kinds, after, second], 1), pos).detach()

    out, mirror = evaluate(pos), torch.diag(torch.tensor([-1.0, 1.0, 1.0]))
    assert (evaluate(pos @ o3.rand_matrix().T) - out).abs().max() <= 1e-10 * out.abs().max()
    assert (evaluate(pos @ mirror) - out).abs().max() > 1e-3 * out.abs().max()
    without = evaluate(pos, False)
    assert (evaluate(pos @ mirror, False) - without).abs().max() <= 1e-10 * without.abs().max()


FULL = "8x0e+8x1o+8x1e+8x0o"


@pytest.mark.parametrize(
    "make",
    [
        lambda: IrrepsSE3HyenaOperator("4x0e", "1x0o", FULL),
        lambda: IrrepsVectorSelfAttention("4x0e", "1x0o", FULL),
        lambda: IrrepsSE3HyenaOperator("4x0e", "1x1e", "8x0e+1x1o", num_blocks=2),
        lambda: IrrepsSE3Hyena("4x0e", "1x0o", "8x0e+2x1o", num_layers=2, num_blocks=2),
        lambda: TensorProductHyenaOperator("4x0e", "1x0o", FULL),
    ],
)
def test_outputs_that_geometry_makes_zero_are_refused(make):
    with pytest.raises(ValueError, match=r"irreps_out must be reachable .* got (0o|1e) that would always be zero"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: IrrepsSE3HyenaOperator("4x0e", "1x0o", "8x0e+8x1o", filter="implicit", num_blocks=2),
        lambda: IrrepsSE3Hyena("4x0e", "1x0o", "8x0e+8x1o", num_layers=2, num_blocks=2),
        lambda: IrrepsSE3HyenaOperator("4x0e+1x1o", "1x0o", "8x0e+8x1o+8x1e+8x0o"),
        lambda: TensorProductHyenaOperator("4x0e", "1x0o", FULL, filter="implicit", short_conv=3),
    ],
)
def test_outputs_that_are_accepted_are_not_zero(make, double, randomise):
    module = randomise(make())
    assert module(module.irreps_in.randn(14, -1), torch.randn(14, 3)).abs().max() > 1e-9
