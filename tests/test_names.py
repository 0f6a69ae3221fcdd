"""Identifiers are the field's words; every argument is described once, in a sentence of its own."""

import ast
import re

import pytest
from public_names import LIBRARY, ROOT, nodes

OLD = {
    "level", "places", "there", "absent", "missing", "lost", "exists", "again", "transformed",
    "values_are_free", "rho_space", "rho_group", "lanes", "slab", "sharpness", "preferring", "max_waves",
    "ripples", "near_pairs", "Ragged", "Rows", "Pairs", "neighbourhood", "max_distance", "num_features", "depth",
    "potentials", "lag_filter",
}  # fmt: skip
FOREIGN = {  # arguments and attributes of torch and of the hosts
    "tg_equiattn/nn/group/norm.py": {"num_features"},
}
ENTRY = re.compile(r"^        (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: (.*(?:\n {12}.*)*)", re.MULTILINE)


def identifiers(tree):
    for node in tree:
        for field in ("id", "arg", "name", "attr"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def test_identifiers_are_the_words_of_the_field():
    found = {}
    for path in LIBRARY:
        place = str(path.relative_to(ROOT))
        if names := sorted(OLD & set(identifiers(nodes(path))) - FOREIGN.get(place, set())):
            found[place] = names
    assert found == {}


def descriptions(text):
    """(names, description) of each entry in the Args section of a docstring."""
    section = re.search(r"\n    Args:\n((?:        .*\n|\n)*)", text + "\n")
    return [(name, " ".join(said.split())) for name, said in ENTRY.findall(section[1])] if section else []


def docstrings():
    for path in LIBRARY:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node, clean=True)):
                indented = "\n    ".join(text.splitlines())
                yield f"{path.relative_to(ROOT)}: {node.name}", descriptions(f"\n    {indented}\n")


def faults(entries):
    for number, (names, said) in enumerate(entries):
        if "," in names:
            yield f"{names}: described together"
        if re.match(r"as\b", said):
            yield f"{names}: {said}"
        if number and said == entries[number - 1][1]:
            yield f"{names}: the same as before"


def test_every_argument_is_described_once():
    found = [f"{place}: {fault}" for place, entries in docstrings() for fault in faults(entries)]
    assert found == []


@pytest.mark.parametrize(
    "entries",
    [[("a, b", "Two numbers.")], [("a", "as b.")], [("a", "A number."), ("b", "A number.")]],
)
def test_faults_are_found(entries):
    """Negative control."""
    assert len(list(faults(entries))) == 1


def test_descriptions_are_read():
    text = "Sum.\n\nArgs:\n    a (int): A number,\n        not zero.\n    b: Another.\n\nReturns:\n    c: none.\n"
    assert descriptions("\n    " + "\n    ".join(text.splitlines())) == [
        ("a", "A number, not zero."),
        ("b", "Another."),
    ]
