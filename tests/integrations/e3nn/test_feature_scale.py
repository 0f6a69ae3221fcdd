"""Large coordinates, in float64 with float32 features; features of unit variance, as e3nn has it, come out about so."""

import warnings
import zlib
from functools import partial

import pytest
import torch
from space import batch_of
from tg_equiattn.integrations import e3nn

from tg_equiattn import nn
from tg_equiattn.testing import TOLERANCE

UTM, IRREPS = torch.tensor([5e5, 5e6, 2e2], dtype=torch.float64), ("16x0e+8x1o", "16x0e+8x1o")


def scalars_and_vectors():
    operator, batch = nn.SE3HyenaOperator(16, 8), batch_of([11, 12])
    return lambda x, pos: operator(x[:, :16], x[:, 16:].unflatten(1, (8, 3)), batch=batch, pos=pos)[1]


LAYERS = {
    "hyena": lambda: e3nn.IrrepsSE3HyenaOperator(*IRREPS),
    "attention": lambda: e3nn.IrrepsVectorSelfAttention(*IRREPS),
    "tensor": lambda: e3nn.TensorProductHyenaOperator(*IRREPS, order="radial"),
    "core": scalars_and_vectors,
}


@pytest.mark.parametrize("kind", LAYERS)
def test_far_from_the_origin(kind):
    layer, near, x = LAYERS[kind](), torch.randn(23, 3, dtype=torch.float64), torch.randn(23, 40)
    wanted, far, single = (layer(x, pos=pos).detach() for pos in (near, near + UTM, (near + UTM).float()))
    limit = TOLERANCE[torch.float32] * wanted.abs().max()
    assert (far - wanted).abs().max() <= limit
    assert (single - wanted).abs().max() > 10 * limit  # half a unit is lost


NODES, INSIDE, OUTSIDE = 40, "8x0e+6x1o", "5x0e+7x1o"
KINDS = ["ewald", "hyena", "radial", "implicit", "model", "attention", "tensor", "tensor implicit"]


def evaluate(layer, x):
    pos = None if getattr(layer, "options", None) and layer.options.causal else 2 * torch.randn(NODES, 3, dtype=x.dtype)
    out = layer(x, pos).detach()
    return torch.stack([out[:, place].square().mean().sqrt() for place in layer.irreps_out.slices()])


def about_one(found):
    return bool(((found > 0.1) & (found < 10)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_unit_features_come_out_about_as_large(kind, new_module):
    """And, the negative control, large ones do not: layers do not scale for the caller."""
    more = ("+3x2e", "+2x2e") if kind == "tensor" else ("", "")
    layer = new_module(kind, INSIDE + more[0], OUTSIDE + more[1]).double()
    x = torch.randn(NODES, layer.irreps_in.dim, dtype=torch.float64)
    assert about_one(evaluate(layer, x)), evaluate(layer, x)
    assert not about_one(evaluate(layer, 1000 * x) / 1000)


@pytest.mark.filterwarnings("ignore:length_scale=1 is not of the size")  # nearest of 3,000 points are 0.1 apart
@pytest.mark.parametrize("nodes", [30, 3000])
@pytest.mark.parametrize(
    "kind", ["hyena", "radial", "implicit", "model", "attention", "tensor", "tensor radial", "tensor acausal"]
)
def test_vectors_from_scalars_and_positions(kind, nodes, new_module):
    """Vectors come out of about unit size, however many nodes there are."""
    layer = new_module(kind, "16x0e", "5x0e+7x1o", "16x0e+16x1o").double()
    x, pos = torch.randn(nodes, 16, dtype=torch.float64), torch.randn(nodes, 3, dtype=torch.float64)
    with torch.no_grad():
        out = layer(x, pos)
    found = torch.stack([out[:, part].square().mean().sqrt() for part in layer.irreps_out.slices()])
    assert about_one(found), found


WITH_LENGTH = {
    "hyena": partial(e3nn.IrrepsSE3HyenaOperator, filter="implicit", short_conv=3),
    "local": partial(e3nn.IrrepsSE3HyenaOperator, local_context=True),
    "radial": partial(e3nn.IrrepsSE3HyenaOperator, order="radial"),
    "model": partial(e3nn.IrrepsSE3Hyena, num_layers=2),
    "attention": e3nn.IrrepsVectorSelfAttention,
    "tensor": e3nn.TensorProductHyenaOperator,
    "core model": partial(nn.SE3Hyena, attention=True, hidden_scalars=5, hidden_vectors=7, num_layers=1),
}


@pytest.mark.parametrize("kind", WITH_LENGTH)
def test_the_unit_does_not_matter(kind, randomise):
    """Positions and length in another unit give the same outputs; positions alone give others."""
    core, irreps = "core" in kind, ("4x0e+2x1o", "4x0e+2x1o")
    layers = [WITH_LENGTH[kind](*((4, 2) if core else irreps), length_scale=length).double() for length in (1, 3.8)]
    randomise(layers[0])
    layers[1].load_state_dict({k: v for k, v in layers[0].state_dict().items() if "extra" not in k}, strict=False)
    x, pos = torch.randn(17, 10, dtype=torch.float64), torch.randn(17, 3, dtype=torch.float64).cumsum(0)
    edges = {"edge_index": torch.arange(34).view(2, 17) % 17} if kind == "local" else {}
    tokens = (x[:, :4], x[:, 4:].unflatten(1, (2, 3))) if core else (x,)
    wanted, out, other = (
        layer(*tokens, pos=scale * pos, **edges) for layer, scale in zip([*layers, layers[1]], (1, 3.8, 1), strict=True)
    )
    wanted, out, other = (part[1] if core else part for part in (wanted, out, other))
    assert (out - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    assert (other - wanted).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"length_scale=3\.8, like this one, got 1\.0"):
        layers[1].load_state_dict(layers[0].state_dict())


@pytest.mark.parametrize("kind", ["hyena", "radial", "attention", "tensor", "model"])
def test_a_wrong_unit_warns_once(kind):
    """Residues in picometres; in angstrom with a length all is well. Neighbors of other chains do not count."""
    layer = WITH_LENGTH[kind]("4x0e", "4x0e+1x1o", "4x0e+3x1o")
    pos = torch.nn.functional.normalize(torch.randn(40, 3), dim=1).cumsum(0)
    chain = None if kind == "radial" else torch.arange(40) // 20
    pos[20:] += 1e4 if kind != "radial" else 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled = WITH_LENGTH[kind]("4x0e", "4x0e+1x1o", "4x0e+3x1o", length_scale=380)
        scaled(torch.randn(40, 4), 380 * pos, chain=chain)
    with pytest.warns(UserWarning, match=r"length_scale=1 is not of the size of pos: .* pass length_scale="):
        layer(torch.randn(40, 4), 380 * pos, chain=chain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(40, 4), 380 * pos, chain=chain)


def test_checkpoints_with_the_old_name_load():
    layer, other = (e3nn.IrrepsSE3HyenaOperator("4x0e", "4x0e", length_scale=scale) for scale in (3.8, 1.0))
    state = layer.state_dict()
    (name,) = (name for name in state if name.endswith("_extra_state") and b"length_scale" in bytes(state[name] % 256))
    text = bytes(state[name][:-4]).replace(b"length_scale", b"length")
    state[name] = torch.tensor([*text, *zlib.crc32(text).to_bytes(4, "big")])
    layer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"length_scale=1\.0, like this one, got 3\.8"):
        other.load_state_dict(state)
