"""The public names; families know what they build on; private names stay in their folder."""

import ast
import importlib
import re
import subprocess
import sys

import pytest
from hosts import HOSTS
from public_names import LIBRARY, PUBLIC, ROOT, nodes

import tg_equiattn

FAMILIES = ("group", "performer", "hyena", "waves", "vector")
BUILDS_ON = {"hyena": {"vector"}, "group": {"performer"}}  # of other families, in nn and functional alike


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
    """But for the layer of PyG that has the arguments and the name of the core's."""
    names = [name for names in PUBLIC.values() for name in names]
    assert sorted([*set(names), "EwaldAttention"]) == sorted(names)


def test_files_have_no_public_names_besides():
    """And packages nothing but a docstring."""
    for path in sorted({*LIBRARY} - {file_of(place) for place in PUBLIC} - {ROOT / "tg_equiattn" / "__init__.py"}):
        assert exported(path) is None, path
        if path.name == "__init__.py":
            assert [type(node) for node in nodes(path)[0].body] == [ast.Expr], path


def test_every_package_is_in_the_wheel():
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    folders = {path.parent.relative_to(ROOT) for path in LIBRARY if path.name == "__init__.py"}
    names = {".".join(folder.parts) for folder in folders}
    wanted = {f"tg_equiattn.{name}" if name.startswith("integrations") else name for name in names}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == wanted


@pytest.mark.parametrize("place", PUBLIC)
def test_public_names_can_be_imported(place):
    if place.startswith("integrations"):
        pytest.importorskip(HOSTS[place.rsplit(".", 1)[1]])
    module = importlib.import_module(f"tg_equiattn.{place}")
    assert [name for name in PUBLIC[place] if not hasattr(module, name)] == []


def test_modules_of_the_core_need_no_import_of_their_own():
    script = "import tg_equiattn, sys; before = 'torch' in sys.modules; tg_equiattn.nn.GroupAttention; print(before)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "False\n"
    core = [place for place in PUBLIC if not place.startswith("integrations")]
    assert set(core) <= set(dir(tg_equiattn))
    assert all(getattr(tg_equiattn, place) is importlib.import_module(f"tg_equiattn.{place}") for place in core)
    with pytest.raises(AttributeError, match="module 'tg_equiattn' has no attribute 'layers'"):
        tg_equiattn.layers  # noqa: B018


def test_families_build_on_no_others():
    """Nothing of waves is built on hyena, and so on; and nothing that is called hyena holds attention."""
    found = []
    for path in LIBRARY:
        family = path.parent.name
        if path.parts[-3] not in ("nn", "functional"):
            continue
        assert family in FAMILIES
        for node in nodes(path):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            others = {part for part in module.split(".") if part in FAMILIES} - {family} - BUILDS_ON.get(family, set())
            found += [f"{path.relative_to(ROOT)}: {other}" for other in others]
            if family == "hyena" and isinstance(node, ast.ClassDef) and "Attention" in node.name:
                found.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert found == []


def private(name):
    return name.startswith("_") and not name.startswith("__")


def imports(path):
    """(line, level, module, name) of every import from this library in a file, and names that tests patch in it."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or module.split(".")[0] == "tg_equiattn":
                yield from ((node.lineno, node.level, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            named = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, 9, "", name.rsplit(".", 1)[-1]) for name in named)


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
