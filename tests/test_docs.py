"""The docs name every public name, their code runs, their links lead somewhere, and they build without a warning."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts import HOSTS
from public_names import PUBLIC

from tg_equiattn.testing import TOLERANCE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
WORK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^ *(```+|\$\$).*?^ *\1", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def documented():
    """Full names on the API pages: entries of autosummaries, and what is described in place."""
    names = set()
    for page in sorted((DOCS / "api").glob("*.rst")):
        module, listing = "", False
        for line in page.read_text().splitlines():
            directive = re.match(r"\.\. (?:py:)?([\w:]+)::\s*(\S*)", line)
            if directive:
                kind, argument = directive.groups()
                module = argument if kind == "currentmodule" else module
                listing = kind == "autosummary"
                if kind in ("autoclass", "autofunction", "data"):
                    names.add(f"{module}.{argument}")
            elif listing and re.fullmatch(r"   [\w.]+", line):
                names.add(f"{module}.{line.strip()}")
            elif line and not line.startswith(" "):
                listing = False
    return names


@pytest.mark.parametrize("place", PUBLIC)
def test_the_api_pages_hold_the_public_names_and_no_others(place):
    names = {name.rpartition(".") for name in documented()}
    assert sorted(PUBLIC[place]) == sorted(name for module, _, name in names if module == f"tg_equiattn.{place}")


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "guarantees.md"], ids=lambda page: page.name)
def test_promised_errors_are_the_tests(page):
    (promised,) = re.findall(r"(1e-\d+) in\s+float64 and (1e-\d+) in\s+float32", page.read_text())
    assert tuple(map(float, promised)) == (TOLERANCE[torch.float64], TOLERANCE[torch.float32])


def anchors(page):
    """What links may name behind a #: the headings of three levels."""
    headings = re.findall(r"^#{1,3} (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    links = [link for link in LINK.findall(WORK.sub("", page.read_text())) if "://" not in link[0]]
    files = [(page.parent / target if target else page, anchor) for target, anchor in links]
    assert not [file for file, _ in files if not file.exists()]
    assert not [(file.name, anchor) for file, anchor in files if anchor and anchor not in anchors(file)]


def blocks(page):
    text = page.read_text()
    return [
        pytest.param(match[1], id=f"{page.stem}:{text[: match.start()].count(chr(10)) + 1}")
        for match in WORK.finditer(text)
        if not match[1].startswith("# torchrun")  # tests/test_shared_graphs.py runs these
    ]


PAGES_THAT_RUN = ("does_it_help", "recipes", "chains", "crystals", "graph_settings", "from_r2conv")
BLOCKS = [
    pytest.param(*b.values, id=b.id, marks=pytest.mark.slow) for p in PAGES_THAT_RUN for b in blocks(DOCS / f"{p}.md")
]


@pytest.mark.parametrize("code", BLOCKS)
def test_blocks_of_code_run(code):
    for package in HOSTS.values():
        if re.search(rf"^(from|import) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    if "integrations.e3nn" in code:
        pytest.importorskip("e3nn")
    if "integrations.pyg" in code:
        pytest.importorskip("torch_geometric")
    if "PeriodicRadiusGraph" in code:
        pytest.importorskip("vesin")
    if "import gemmi" in code:
        pytest.importorskip("gemmi")
        pytest.importorskip("MDAnalysisTests")
    with torch.compiler.set_stance("force_eager"):  # each module's own tests compile
        exec(compile(code, "block", "exec"), {"__name__": "block"})


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DOCS / "gallery").glob("tutorial_*.py")), ids=lambda path: path.stem)
def test_tutorials_run(path, tmp_path):
    (host,) = set(re.findall(r"tg_equiattn\.integrations\.(\w+)", path.read_text()))
    for package in ("matplotlib", HOSTS[host]):
        pytest.importorskip(package)
    command = [sys.executable, "-W", "ignore", str(path)]
    environment = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_docs_build_without_a_warning(tmp_path):
    """From a copy, tutorials laid out and not executed, without the theme, whose menus take as long as all the rest."""
    for package in ("sphinx", "myst_parser", "sphinx_gallery", *(HOSTS[host] for host in ("escnn", "pyg", "e3nn"))):
        pytest.importorskip(package)
    if importlib.util.find_spec("sphinx-mathjax-offline") is None:  # which has formulas drawn
        pytest.skip("sphinx-mathjax-offline is not installed")
    generated = shutil.ignore_patterns("_build", "generated", "tutorials", "__pycache__")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=generated)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-D", "plot_gallery=0",
               "-D", "html_theme=basic", "docs", "html"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    html = {str(path.relative_to(tmp_path / "html")): path.read_text() for path in tmp_path.glob("html/**/*.html")}
    assert "tutorials/tutorial_1_escnn.html" in html
    assert [
        name for name, text in html.items() if re.search(r'<(script|link)[^>]+(src|href)="(https?:)?//', text)
    ] == []
    pages = [html[f"{path.stem}.html"] for path in DOCS.glob("*.md") if path.stem not in ("changelog", "contributing")]
    for name in {
        name for place in PUBLIC for name in PUBLIC[place] if name.endswith(("Attention", "Conv", "Operator"))
    }:
        unlinked = re.compile(
            rf'(?<!generated)<code class="[^"]*"><span class="pre">(nn\.)?{name}</span></code>(?!</a>)'
        )
        assert not [text for text in pages if unlinked.search(text)], name
