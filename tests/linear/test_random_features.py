"""When features are drawn, from what, and that every rank draws alike."""

import copy
import functools
import pickle

import pytest
import ranks
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tg_equiattn.linear.random_features import RandomFeatures, draw_directions
from tg_equiattn.nn import PerformerAttention, RelativePerformer

CPU = torch.device("cpu")


def directions(features):
    return features.directions(CPU, torch.float64)


def test_draws_are_the_seeds_alone():
    def seeded(seed):
        torch.manual_seed(seed)
        return RandomFeatures(11, 5)

    one, two, other = (seeded(seed) for seed in (3, 3, 4))
    for _ in range(3):
        torch.randn(7)  # the global generator's state plays no part
        drawn = one(CPU, torch.float32)
        assert torch.equal(drawn, two(CPU, torch.float32))
        assert not torch.equal(drawn, other(CPU, torch.float32))
        one.redraw_features()
        two.redraw_features()
    for features in (one, other):
        features.redraw_features(torch.Generator().manual_seed(5))
    assert one.seed == other.seed
    assert torch.equal(directions(one), directions(other))


def test_checkpoint_goes_on_as_an_uninterrupted_run():
    features, resumed = RandomFeatures(11, 5), RandomFeatures(11, 5)
    features.redraw_features()
    resumed.load_state_dict(features.state_dict())
    same = features, resumed, copy.deepcopy(features)
    for _ in range(3):
        drawn = [each(CPU, torch.float32) for each in same]
        assert all(torch.equal(directions, drawn[0]) for directions in drawn)
        for each in same:
            each.redraw_features()


def test_draws_between_steps_are_written_over_the_old_ones():
    """A captured graph keeps the address of the directions, and so reads new and loaded ones."""
    features, other = RandomFeatures(11, 5), RandomFeatures(11, 5)
    kept, first = directions(features), directions(features).clone()
    features.redraw_features()
    assert directions(features) is kept
    assert not torch.equal(kept, first)
    torch.testing.assert_close(kept, draw_directions(features.seed, 1, 11, 5), rtol=0, atol=0)
    features.load_state_dict(other.state_dict())
    assert directions(features) is kept
    assert torch.equal(kept, directions(other))
    assert torch.equal(directions(copy.deepcopy(features)), kept)


@pytest.mark.slow
def test_draws_between_steps_reach_a_compiled_layer_without_compiling_again():
    layer = PerformerAttention(8, 8, 2, position=None, method="features")
    plain, counter = copy.deepcopy(layer), CompileCounterWithBackend("eager")
    compiled, x = torch.compile(layer, fullgraph=True, backend=counter), torch.randn(1, 9, 8)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
        layer.redraw_features()
        plain.redraw_features()
    assert counter.frame_count == 1
    for module in (layer, plain):
        module.redraw_features(torch.Generator().manual_seed(0), 100)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)


def test_another_number_of_features():
    """The layer draws as one that was made with this number; a state says which number it has."""
    layer, other = (PerformerAttention(8, 8, 2, position=None, method="features") for _ in range(2))
    made = PerformerAttention(8, 8, 2, position=None, method="features", num_random_features=7)
    other.load_state_dict(layer.state_dict())
    before, x = layer.state_dict(), torch.randn(1, 9, 8)
    layer.redraw_features(num_random_features=7)
    assert directions(layer.features).shape == (7, 3)
    half = draw_directions(layer.features.seed, 1, 4, 3)
    assert torch.equal(directions(layer.features), torch.cat([half, -half])[:7])
    made.load_state_dict(layer.state_dict())
    for same in (made, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(same(x), layer(x), rtol=0, atol=0)
    for module, state, had, came in ((other, layer.state_dict(), 64, 7), (layer, before, 7, 64)):
        message = (
            rf"num_random_features={had}, like this one, got {came}; call redraw_features\(num_random_features={came}\)"
        )
        for strict in (True, False):
            with pytest.raises(ValueError, match=message):
                module.load_state_dict(state, strict=strict)
    other.redraw_features(num_random_features=7)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="num_random_features must be a positive integer, got 0"):
        layer.redraw_features(num_random_features=0)


def test_draws_are_these_numbers():
    """Draws of one seed are the same in all releases."""
    first, second = (draw_directions(1, number, 2, 3) for number in (0, 1))
    golden = [
        [0.6926157326409702, -1.9760675881409437, -0.7759118153208066],
        [-1.520173705959019, -1.1325922014712417, 1.5274706370132431],
    ]
    torch.testing.assert_close(first, torch.tensor(golden, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert not torch.equal(first, second)


def test_the_seed_survives_what_training_tools_do_to_buffers():
    features = RandomFeatures(11, 5)
    seed, drawn = features.seed, directions(features)
    for change in (torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double):
        assert change(features).seed == seed
        assert torch.equal(directions(features), drawn)


def test_any_digits_are_a_seed():
    """Those of an average of different seeds, and uninitialised memory, too. All modules read them alike."""
    torch.manual_seed(0)
    one, two, three, four = (RandomFeatures(11, 5) for _ in range(4))
    states = one.state_dict(), two.state_dict()
    mean = {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
    for each in (three, four):
        each.load_state_dict(mean)
    assert torch.equal(directions(three), directions(four))
    three.load_state_dict({name: (x + x) / 2 for name, x in states[0].items()})
    assert torch.equal(directions(three), directions(one))
    three.seed_digits.copy_(torch.tensor([float("nan"), -3.0, 1e9, float("inf"), 254.6]))
    assert directions(three).isfinite().all()
    assert three.seed == 0x0000FFFFFF


IMAGES = torch.linspace(0, 1, 4 * 35, dtype=torch.float64).view(4, 1, 5, 7).sin()


def trained(seed, images, wrap=lambda net: net):
    """The last gradients of some training steps, between which features are drawn, and the features."""
    torch.manual_seed(seed)
    options = {"channels": 12, "num_layers": 2, "heads": 3, "cutoff": 2, "dropout": 0.0}
    model = RelativePerformer(1, 3, **options).double().to(images.device)
    net = wrap(model)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()
        model.redraw_features()
    return [p.grad.cpu() for p in net.parameters()], directions(model.blocks[1].attention.features)


def train_rank(number, device, folder):
    ids = [device.index] if device.type == "cuda" else None
    wrap = functools.partial(torch.nn.parallel.DistributedDataParallel, device_ids=ids)  # makes unlike ranks alike
    torch.save(trained(number, IMAGES[2 * number :][:2].to(device), wrap), f"{folder}/{number}.pt")


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path):
    ranks.run(train_rank, tmp_path)
    expected, drawn = trained(0, IMAGES)
    for number in range(ranks.WORLD):
        grads, projection = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert torch.equal(projection, drawn)
        torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-12)
