"""State_dicts, taken over and averaged."""


def take_weights(module, other):
    """Load the weights of a module with other settings, which by itself a checkpoint refuses."""
    weights = {name: x for name, x in other.state_dict().items() if not name.endswith("_extra_state")}
    module.load_state_dict(weights, strict=False)
