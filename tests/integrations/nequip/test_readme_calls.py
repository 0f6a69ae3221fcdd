"""The settings of NequIP that README advertises: charges act beyond the cutoff of the messages."""

import functools

import pytest
import readme
import yaml
from atoms import pull, salt
from hydra.utils import instantiate
from nequip.utils.global_state import set_global_state
from nequip_models import SPECIES, energy, fit, labelled

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


def test_charges_beyond_the_cutoff():
    """By the configuration that README shows, beside NequIP's own settings."""
    set_global_state()
    shown = [yaml.safe_load(span) for span in readme.SETTINGS]
    own = {"seed": 0, "model_dtype": "float64", "type_names": SPECIES, "r_max": 3.0, "num_layers": 2, "l_max": 1,
           "num_features": 4, "avg_num_neighbors": 4.0, "radial_mlp_width": 8,
           "per_type_energy_scales": 1.3, "per_type_energy_shifts": 0.2}  # fmt: skip
    model = instantiate(own | shown[0] | shown[1], _convert_="all")
    alone = instantiate(own | {"_target_": "nequip.model.NequIPGNNModel"}, _convert_="all")
    assert abs(pull(functools.partial(energy, alone.eval()))) < 1e-10
    model = fit(model.eval(), labelled(salt(), salt((2, 1, 1))))
    assert pull(functools.partial(energy, model)) == pytest.approx(14.4 * (1 / 12 - 1 / 20), rel=0.01)
