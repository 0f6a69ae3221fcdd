"""The libraries that the integrations plug into, any of which may be missing."""

import importlib.util

HOSTS = {"escnn": "escnn", "pyg": "torch_geometric", "e3nn": "e3nn", "mace": "mace", "nequip": "nequip", "ase": "ase"}


def missing(integration):
    try:
        return importlib.util.find_spec(HOSTS[integration]) is None
    except ModuleNotFoundError:
        return True
