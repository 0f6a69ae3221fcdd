"""Sphinx configuration: ``python -m sphinx -W -b html docs docs/_build/html``. Nothing is fetched from the network."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

from tg_equiattn import __version__

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # the tutorials' tensors are small: threads would wait for each other
warnings.filterwarnings(
    "ignore", category=DeprecationWarning
)  # of the hosts, where a tutorial imports them
shutil.rmtree(
    Path(__file__).parent / "api" / "generated", ignore_errors=True
)  # pages of names that went

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "tg_equiattn"
author = "the authors of tg_equiattn"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "name_links",
]
exclude_patterns = ["_build", "_extensions", "_templates", "gallery"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"tg_equiattn {release}"
html_show_copyright = False
html_css_files = ["style.css"]
html_js_files = ["copy.js"]

# Formulas are drawn by one file of the package sphinx-mathjax-offline, which the site ships.
MATHJAX = Path(importlib.import_module("sphinx-mathjax-offline").__path__[0])
html_static_path = ["_static", str(MATHJAX / "static" / "mathjax" / "tex-svg-full.js")]
mathjax_path = "tex-svg-full.js"

# Links to the pages of torch and of the hosts need the network, so they are made on Read the Docs alone.
if os.environ.get("READTHEDOCS") or os.environ.get("INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "torch_geometric": ("https://pytorch-geometric.readthedocs.io/en/latest", None),
        "e3nn": ("https://docs.e3nn.org/en/stable", None),
        "escnn": ("https://quva-lab.github.io/escnn", None),
    }

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = ["ase", "mace", "nequip"]  # which want different releases of e3nn
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say it in words
autodoc_inherit_docstrings = (
    False  # what a host's base class says of its own method is its own page's
)
autosummary_generate = True
napoleon_custom_sections = ["Shapes"]
napoleon_use_rtype = False
napoleon_preprocess_types = False

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"tutorial_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "image_scrapers": ("matplotlib",),
    "matplotlib_animations": False,
    "reset_modules": ("matplotlib",),
}


def join_names(app, what, name, obj, options, lines: list[str]) -> None:
    """Put names of arguments that share a description, over several lines, on one: napoleon reads one."""
    place = 0
    while place < len(lines) - 1:
        first, second = lines[place], lines[place + 1]
        if re.fullmatch(r"\s+\w+(, \w+)*,", first) and re.match(r"\s+\w+(, \w+)*(,$|: )", second):
            lines[place : place + 2] = [f"{first} {second.strip()}"]
        else:
            place += 1


# Members that users call or read; others belong to a host or are internal.
MEMBERS = re.compile(
    "forward|attention_map|redraw_features|export|check_equivariance|born_charges|mask_after|rotmnist|"
    "cifar10|patchcamelyon|matrices|cayley|inverse|identity|lattice|dim|isometries|source|target|edges|"
    "pos|offsets|count|lmax|ranges|real_space|reciprocal|radial|scales"
)
# Arguments that stand last where a class has more than ten.
RARE = re.compile(
    "error|max_hkl|kernels|lmax|dropout|input_dropout|pool_dropout|window_shape|padding_mode|encoding|head_channels|"
    "context_channels|context_type|scale_window|num_random_features|lifting_channels|norm_between|"
    "pools|crops|norm|periodic|num_blocks|edge_channels|batch_size|max_num_nodes|"
    "kwargs|pool|local_context"
)


def skip_internal(app, what, name, obj, skip, options) -> bool | None:
    return True if what == "class" and not MEMBERS.fullmatch(name) else None


def rare_last(app, what, name, obj, options, lines: list[str]) -> None:
    """Put arguments that are rarely set into a list of their own at the end, if there are more than ten arguments."""
    blocks, place = {}, None
    for number, line in enumerate(lines):
        if match := re.match(r":(param|type) \\?\*?\\?\*?([\w, ]+):", line):
            place = number if place is None else place
            blocks.setdefault(name := match[2], []).append(line)
        elif blocks and line.startswith(" ") and number == place + sum(map(len, blocks.values())):
            blocks[name].append(line)
    if sum(len(name.split(", ")) for name in blocks) <= 10:
        return
    rare = [name for name in blocks if all(map(RARE.fullmatch, name.split(", ")))]
    listed = [line for name in blocks if name not in rare for line in blocks[name]]
    if rare:
        listed += [":Rarely set:", *(f"    * **{n}** -- {described(blocks[n])}" for n in rare)]
    lines[place : place + sum(map(len, blocks.values()))] = listed


def described(block: list[str]) -> str:
    """The text of a field of an argument, in one line."""
    words = [line.strip() for line in block if not line.startswith(":type")]
    return " ".join([words[0].partition(": ")[2], *words[1:]])


def setup(app) -> None:
    app.connect("autodoc-process-docstring", join_names, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", rare_last, priority=600)
    app.connect("autodoc-skip-member", skip_internal)
