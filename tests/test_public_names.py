"""The public names; families know what they build on; private names stay in their folder."""

import ast
import importlib
import re

import pytest
from hosts import HOSTS
from public_names import LIBRARY, PUBLIC, ROOT, nodes

import tg_equiattn


def file_of(place):
    folder = ROOT if place.startswith("integrations") else ROOT / "tg_equiattn"
    path = folder.joinpath(*place.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(path):
    for node in nodes(path)[0].body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return None


def test_public_names_are_these():
    for place, names in PUBLIC.items():
        assert sorted(exported(file_of(place))) == sorted(names)


PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs/gallery").glob("*.py")]
PAGES = [path for path in [*PAGES, *(ROOT / "examples").glob("*.py")] if "_build" not in path.parts]


def imported(text):
    for place, names in re.findall(r"from tg_equiattn\.?([\w.]*) import ([\w, ]+|\([^)]+\))", text):
        yield from (f"{place}.{name}" for name in re.findall(r"\w+", names))


def test_pages_import_public_names_alone():
    public = {f"{place}.{name}" for place, names in PUBLIC.items() for name in names}
    found = {name for path in PAGES for name in imported(path.read_text())}
    assert len(found) > 20
    assert sorted(found - public) == []


def test_public_names_are_each_in_one_place():
    """But for the layer of PyG that has the arguments and the name of the core's, and what MACE and NequIP share."""
    names = [name for names in PUBLIC.values() for name in names]
    assert sorted([*set(names), "EwaldAttention", "write_lammps"]) == sorted(names)


def test_files_have_no_public_names_besides():
    """And packages nothing but a docstring, except that the integrations compare their folder with the core's."""
    for path in sorted({*LIBRARY} - {file_of(place) for place in PUBLIC} - {ROOT / "tg_equiattn" / "__init__.py"}):
        assert exported(path) is None, path
        if path.name == "__init__.py" and path.parent != ROOT / "integrations":
            assert [type(node) for node in nodes(path)[0].body] == [ast.Expr], path


def test_every_package_is_in_the_wheel():
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    folders = {path.parent.relative_to(ROOT) for path in LIBRARY if path.name == "__init__.py"}
    names = {".".join(folder.parts) for folder in folders}
    names.add("integrations.mace.potentials")  # data alone
    wanted = {f"tg_equiattn.{name}" if name.startswith("integrations") else name for name in names}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == wanted


@pytest.mark.parametrize("place", PUBLIC)
def test_public_names_can_be_imported(place):
    if place.startswith("integrations"):
        pytest.importorskip(HOSTS[place.rsplit(".", 1)[1]])
    module = importlib.import_module(f"tg_equiattn.{place}")
    assert [name for name in PUBLIC[place] if not hasattr(module, name)] == []


def test_modules_of_the_core_need_no_import_of_their_own():
    core = [place for place in PUBLIC if not place.startswith("integrations")]
    assert set(core) <= set(dir(tg_equiattn))
    assert all(getattr(tg_equiattn, place) is importlib.import_module(f"tg_equiattn.{place}") for place in core)
    with pytest.raises(AttributeError, match="module 'tg_equiattn' has no attribute 'layers'"):
        tg_equiattn.layers  # noqa: B018


@pytest.mark.parametrize("place", ["functional", "nn"])
def test_old_names_raise_an_error_with_the_new_ones(place):
    module = importlib.import_module(f"tg_equiattn.{place}")
    for name, new in module._OLD.items():
        with pytest.raises(ImportError, match=rf"tg_equiattn\.{place}\.{name} is now .*{re.escape(new)}"):
            exec(f"from tg_equiattn.{place} import {name}")
        assert re.search(r"(?:tg_equiattn\.nn\.)?(\w+)(?:\(.*\))?$", new)[1] in PUBLIC["nn"]
    with pytest.raises(AttributeError, match=f"module 'tg_equiattn.{place}' has no attribute 'other'"):
        module.other  # noqa: B018
