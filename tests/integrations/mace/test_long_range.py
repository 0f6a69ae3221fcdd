"""Long range in MACE: what the model was stays, and energies, forces and stress are right whatever repeats."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.stress import full_3x3_to_voigt_6_stress
from atoms import salt, slab
from e3nn.util import jit
from mace import modules
from mace.calculators import MACECalculator
from mace.modules import blocks, models
from mace.modules.lora import inject_LoRAs, merge_lora_weights
from mace.modules.wrapper_ops import CuEquivarianceConfig
from mace.tools.scripts_utils import extract_model
from mace_models import batch_of, graphs, layer_of, loader, make, make_mace, mixed, outputs
from space import error
from tg_equiattn.integrations.mace import add_long_range

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
AFTER = [(0,), (1,), (0, 1)]


def layers(model, after):
    """What is far, where attention comes after these blocks."""
    return [model.products[n].long_range for n in after]


@pytest.mark.parametrize("kind", ["MACE", "ScaleShiftMACE"])
@pytest.mark.parametrize("after", AFTER)
def test_a_model_stays_as_it_was(kind, after):
    """At gain 0, in all it predicts; its parameters keep their names, and what was saved before loads."""
    model, batch = make_mace(kind), batch_of(*mixed())
    before = model(batch.to_dict(), compute_stress=True)
    kept = copy.deepcopy(model.state_dict())
    assert add_long_range(model, after, batch=batch) is model
    now = model(batch.to_dict(), compute_stress=True)
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(now[name], before[name], rtol=1e-12, atol=1e-15)
    alone = model(batch.to_dict())["forces"]  # without displacement
    torch.testing.assert_close(alone, now["forces"], rtol=1e-10, atol=1e-12)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in kept.items())
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert not unexpected
    assert {name.split(".")[2] for name in missing} == {"long_range"}
    with torch.no_grad():
        layers(model, after)[0].gain.fill_(0.5)
    assert error(model(batch.to_dict())["energy"], before["energy"]) > 1e-4


def test_virials_are_of_what_is_strained(far):
    """A strain given with the data, as MACE's compiled calculators do, is the strain of all of it."""
    model, atoms = far(), salt()
    strain = 1e-4 * torch.randn(1, 3, 3)  # so small that no neighbor comes or goes
    strain = strain + strain.mT
    given = batch_of(atoms).to_dict() | {"displacement": strain.clone().requires_grad_()}
    moved = atoms.copy()
    moved.set_cell(moved.cell.array @ (np.eye(3) + strain[0].numpy()), scale_atoms=True)
    strained = model(given, compute_virials=True)["energy"]
    assert error(strained, model(batch_of(moved).to_dict())["energy"]) < 1e-10
    assert error(strained, model(batch_of(atoms).to_dict())["energy"]) > 1e-8


def test_a_release_that_takes_no_displacement(far, monkeypatch):
    """As 0.3.15, whose stress would be wrong in silence."""
    own = models.prepare_graph
    forget = lambda data, **options: own({k: x for k, x in data.items() if k != "displacement"}, **options)  # noqa: E731
    monkeypatch.setattr(models, "prepare_graph", forget)
    data = batch_of(salt()).to_dict()
    with pytest.raises(RuntimeError, match="stress would be wrong: this release of mace-torch"):
        far()(data, compute_stress=True)


def test_cells_around_what_is_open_are_not_read(far):
    """MACE puts them there."""
    model, data = far(), batch_of(*mixed()).to_dict()
    energies = model(dict(data))["energy"]
    data["cell"] = torch.where(data["pbc"].flatten()[:, None], data["cell"], 7 * data["cell"] + 1)
    assert error(model(data)["energy"], energies) < 1e-12


def test_scales_are_the_features(far):
    """At the start, attention is as large as what it comes to, whatever the size of features."""
    batch = batch_of(*mixed())
    for size in (1.0, 1e-2):
        model, seen = make_mace(), []
        with torch.no_grad():
            model.products[0].linear.weight *= size
        model.products[0].register_forward_hook(lambda *x, seen=seen: seen.append(x[2].detach()))
        add_long_range(model, batch=batch, gain=1.0)
        model(batch.to_dict())
        before, after = seen
        for place in model.products[0].long_range.attention.irreps_in.slices():
            added = (after - before)[:, place]
            torch.testing.assert_close(added.square().mean().sqrt(), before[:, place].square().mean().sqrt())


@pytest.mark.parametrize("own", [{}, {"charges": {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}, "learn": True}])
def test_float32(own):
    torch.set_default_dtype(torch.float32)
    model, names = make(**own), ["energy", "forces"]
    assert {x.dtype for x in (*layer_of(model).parameters(), *layer_of(model).buffers())} <= {
        torch.float32,
        torch.int64,
    }
    if own:
        names += ["long_range_energy", "charges", "dipole", "born_charges"]
        torch.nn.init.normal_(layer_of(model).weights, std=3)
    out = outputs(model, salt(), molecule("H2O"))
    torch.set_default_dtype(torch.float64)
    wanted = outputs(model.double(), salt(), molecule("H2O"))
    for name in names:
        assert out[name].dtype == torch.float32 or name == "energy"
        assert error(out[name].double(), wanted[name]) < 1e-4


def test_copies_and_calculator(far, tmp_path):
    """deepcopy, torch.save, and MACE's own calculator, alone and as a committee. Scales come with a state_dict."""
    model, atoms = far(after=(0, 1)), salt()
    out = model(batch_of(atoms).to_dict(), compute_stress=True)
    torch.save(model, tmp_path / "far.model")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = far(gain=0.0, after=(0, 1), batch=batch_of(molecule("H2O")))
    assert error(fresh.products[0].long_range.scale_out, model.products[0].long_range.scale_out) > 0.01
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    loaded = torch.load(tmp_path / "far.model", weights_only=False)
    for other in (copy.deepcopy(model), loaded, fresh):
        assert torch.equal(other(batch_of(atoms).to_dict())["energy"], out["energy"])
    atoms.calc = MACECalculator(str(tmp_path / "far.model"), default_dtype="float64")
    assert abs(atoms.get_potential_energy() - out["energy"].item()) < 1e-10
    assert np.abs(atoms.get_forces() - out["forces"].detach().numpy()).max() < 1e-10
    stress = full_3x3_to_voigt_6_stress(out["stress"][0].detach().numpy())
    assert np.abs(atoms.get_stress() - stress).max() < 1e-12
    features = out["node_feats"].detach().numpy()
    assert np.abs(atoms.calc.get_descriptors(atoms, invariants_only=False) - features).max() < 1e-12
    atoms.calc = MACECalculator(models=[model, loaded], default_dtype="float64", pad_num_atoms=11, pad_num_edges=500)
    assert abs(atoms.get_potential_energy() - out["energy"].item()) < 1e-10


def test_threads(far):
    """Each thread's products see the data of its own call."""
    model, systems = far().requires_grad_(False), 4 * mixed()
    batches = [batch_of(atoms).to_dict() for atoms in systems]
    wanted = [model(dict(data))["energy"] for data in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda data: model(dict(data))["energy"], batches))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_one_pbc_for_all_graphs(far):
    """As TorchSim hands it on."""
    model, systems = far(), [salt(), salt((2, 1, 1))]
    data = batch_of(*systems).to_dict()
    wanted = model(dict(data))["energy"]
    for pbc in (torch.tensor([True, True, True]), torch.tensor(True), True):
        assert torch.equal(model(data | {"pbc": pbc}, compute_stress=True)["energy"], wanted)


@pytest.mark.parametrize("after", AFTER)
def test_every_parameter_is_in_the_graph_from_the_start(after, far):
    """At gain 0 too, as DistributedDataParallel wants."""
    model = far(gain=0.0, after=after)
    out = model(batch_of(*mixed()).to_dict(), training=True, compute_stress=True)
    (out["energy"].sum() + out["forces"].square().sum() + out["stress"].square().sum()).backward()
    ours = {name: x.grad for name, x in model.named_parameters() if "long_range" in name}
    assert all(x is not None for x in ours.values())
    gains = [layer.gain for layer in layers(model, after)]
    assert [name for name, x in ours.items() if x.any()] == [n for n, x in model.named_parameters() if x in {*gains}]


def test_low_rank_adaptation():
    """Added after MACE's LoRA, long range learns beside it and stays as it is where that is merged."""
    model, batch = inject_LoRAs(make_mace(), rank=2), batch_of(*mixed())
    add_long_range(model, batch=batch, gain=0.5)
    learned = {name for name, x in model.named_parameters() if x.requires_grad}
    assert "products.0.long_range.gain" in learned
    assert all("lora_" in name or "long_range" in name for name in learned)
    before = model(batch.to_dict())["energy"]
    assert error(merge_lora_weights(model)(batch.to_dict())["energy"], before) < 1e-12


@pytest.mark.parametrize("own", [{}, {"charges": {"Na": 0.7, "Cl": -0.7}}])
def test_forms_of_a_batch(own):
    """A batch, its data, batches of a loader and graphs mean the same atoms."""
    systems, states = [salt(), slab(), salt((2, 1, 1))], []
    every = batch_of(*systems)
    for batch in (every, every.to_dict(), iter([*loader(systems, 2)]), graphs(systems), [every, every]):
        torch.manual_seed(3)
        states.append(add_long_range(make_mace(), batch=batch, **own).state_dict())
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-9, atol=1e-12, equal_nan=True)
    assert add_long_range(make_mace(), batch=graphs(systems)[0], **own)
    for wrong, name in (
        (systems[0], "Atoms with Atom"),
        (None, "NoneType"),
        ([], "an empty list"),
        ("x", "str with str"),
    ):
        with pytest.raises(ValueError, match=f"batch must .* got {name}"):
            add_long_range(make_mace(), batch=wrong, **own)


def test_what_is_refused(far):
    model, batch = far(), batch_of(molecule("H2O"))
    for script in (jit.compile, torch.jit.script):
        with pytest.raises(NotImplementedError, match=r"TorchScript: save it with torch\.save.*LAMMPS"):
            script(copy.deepcopy(model))
    with pytest.raises(NotImplementedError, match="does not support TorchScript"):
        torch.jit.trace(model, (batch.to_dict(),), strict=False)
    with pytest.raises(NotImplementedError, match="sums over all atoms, and LAMMPS gives each process a part"):
        model(batch.to_dict(), lammps_mliap=True)
    for name in ("compute_edge_forces", "compute_atomic_stresses"):
        with pytest.raises(
            NotImplementedError, match="share forces and stress among edges, which carry the short range only"
        ):
            model(batch.to_dict(), **{name: True})
    with pytest.raises(NotImplementedError, match=r"compile_mode, cuequivariance, .* would lose its long range"):
        extract_model(model)
    with pytest.raises(TypeError, match="without long range, got LongRangeScaleShiftMACE"):
        add_long_range(model, batch=batch)
    dipoles, polar = modules.AtomicDipolesMACE.__new__(modules.AtomicDipolesMACE), make_mace()
    polar.__class__ = type("PolarMACE", (modules.ScaleShiftMACE,), {})
    for unknown, name in ((torch.nn.Linear(1, 1), "Linear"), (dipoles, "AtomicDipolesMACE"), (polar, "PolarMACE")):
        with pytest.raises(TypeError, match=f"MACE or ScaleShiftMACE without long range, got {name}"):
            add_long_range(unknown, batch=batch)
    for after in ((), (2,), (0, 0), (-1,), (0.0,), (True,), ("0",), "0", 0, {0}):
        with pytest.raises(ValueError, match=r"after must be different blocks from 0 to 1, such as \(0,\), got"):
            add_long_range(make_mace(), after, batch=batch)
    biased = make_mace()
    biased.products[0].__class__ = type("OtherProduct", (blocks.EquivariantProductBasisBlock,), {})
    with pytest.raises(TypeError, match="products of model must be EquivariantProductBasisBlock, got OtherProduct"):
        add_long_range(biased, batch=batch)
    with pytest.raises(ValueError, match="charges must be given with learn and dielectric, got None with True"):
        add_long_range(make_mace(), batch=batch, learn=True)
    without = {name: x for name, x in batch.to_dict().items() if name != "pbc"}
    with pytest.raises(ValueError, match="data must have pbc"):
        model(without)
    other = make_mace()
    other.products[0].cueq_config = CuEquivarianceConfig(layout="ir_mul", layout_str="ir_mul")
    other.products[0].cueq_config.enabled = True
    with pytest.raises(ValueError, match=r"model must have features in the layout mul_ir, .* got ir_mul"):
        add_long_range(other, batch=batch)
    untouched = make_mace()
    with pytest.raises(ValueError, match="width must be a positive number, got -1"):
        add_long_range(untouched, batch=batch, width=-1.0)
    assert type(untouched) is modules.ScaleShiftMACE
    assert not any("long_range" in name for name in untouched.state_dict())
