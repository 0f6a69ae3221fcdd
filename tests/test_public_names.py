"""Names that users import keep their places, and nobody imports a name that begins with an underscore."""

import ast
import importlib
from pathlib import Path

import pytest
from hosts import HOSTS

ROOT = Path(__file__).parents[1]
OTHERS = {"_init_args_hst"}  # Triton's, patched to see which addresses are read

PLACES = {
    "tg_equiattn.groups": "FiniteGroup cyclic dihedral from_generators full_octahedral icosahedral mirror octahedral "
    "trivial",
    "tg_equiattn.grids": "Neighbourhood PixelGrid transform_grid",
    "tg_equiattn.neighbors": "Neighbors near_pairs",
    "tg_equiattn.encodings": "AbsoluteEncoding AxialEncoding FullEncoding JointEncoding OffsetMLP OffsetTable "
    "SinusoidEncoding relation_index rotated_offsets solid_harmonics spherical_bessel",
    "tg_equiattn.sequences": "Sequences",
    "tg_equiattn.orders": "radial_order",
    "tg_equiattn.testing": "TOLERANCE act equivariance_error off_lattice_errors",
    "tg_equiattn.functional": "EwaldKernels clipped_attention ewald_attention geometric_product group_attention "
    "lifting_attention linear_attention bilinear_long_conv orthogonal_projection scalar_long_conv softmax_features "
    "sum_aggregation vector_attention vector_long_conv window_attention",
    "tg_equiattn.nn": "CliffordMLP EwaldAttention GEViT GlobalPooling GroupAttention GroupAttentionBlock "
    "GroupPooling LiftingAttention PerformerAttention PerformerBlock PixelEmbedding Pointwise "
    "PositionalPerformerAttention "
    "RandomFeatures RegularBatchNorm RegularGlobalNorm RegularLayerNorm RelativePerformer SE3Hyena "
    "SE3HyenaOperator SpatialCrop SpatialMaxPool VectorSelfAttention VectorTransformer",
    "tg_equiattn.integrations.escnn": "GEViT R2AttentionBlock R2GroupAttention R2LiftingAttention "
    "R2RegularGlobalNorm R2RegularLayerNorm R3AttentionBlock R3GlobalAttention R3GroupAttention R3LiftingAttention "
    "R3RegularGlobalNorm R3RegularLayerNorm group_from_gspace",
    "tg_equiattn.integrations.pyg": "PixelGraph PixelGraphClassifier PositionalPerformerConv RelativePerformerConv "
    "Superpixels",
    "tg_equiattn.integrations.e3nn": "CliffordMLP EwaldAttention LongTensorProduct SE3Hyena SE3HyenaOperator "
    "TensorProductHyenaOperator VectorSelfAttention",
}


@pytest.mark.parametrize("place", PLACES)
def test_public_names_keep_their_places(place):
    if "integrations" in place:
        pytest.importorskip(HOSTS[place.rsplit(".", 1)[1]])
    module = importlib.import_module(place)
    names = PLACES[place].split()
    assert [name for name in names if not hasattr(module, name)] == []
    if hasattr(module, "__all__"):
        assert sorted(names) == sorted(set(module.__all__) & set(names))


def private(name):
    return name.startswith("_") and not name.startswith("__")


def imports(path):
    """(line, level, module, name) of every import from this library in a file, and names that tests patch in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or module.split(".")[0] == "tg_equiattn":
                yield from ((node.lineno, node.level, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            named = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, 9, "", name.rsplit(".", 1)[-1]) for name in named if name not in OTHERS)


def offenders(folder):
    """Imports of private names from outside the folder they are in."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, level, module, name in imports(path):
            here = level == 1 and "." not in module  # a file of the same folder, or a name of it
            if not here and (private(name) or any(private(part) for part in module.split("."))):
                yield f"{path.relative_to(ROOT)}:{line}: {'.' * min(level, 3)}{module} {name}"


@pytest.mark.parametrize("folder", ["tg_equiattn", "integrations", "tests", "examples"])
def test_private_names_stay_in_their_folder(folder):
    found = [line for line in offenders(folder) if not line.endswith("_host require")]  # of all integrations
    assert found == []


def test_a_private_import_is_seen(tmp_path):
    """Negative control."""
    (tmp_path / "some.py").write_text(
        "from tg_equiattn.functional import _secret\nfrom ._mine import x\nfrom .._theirs import y\n"
        "monkeypatch.setattr(module, '_TILE', 1)\n"
    )
    seen = [(level, module, name) for _, level, module, name in imports(tmp_path / "some.py")]
    assert seen == [(0, "tg_equiattn.functional", "_secret"), (1, "_mine", "x"), (2, "_theirs", "y"), (9, "", "_TILE")]
