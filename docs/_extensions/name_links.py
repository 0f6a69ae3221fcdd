"""Sphinx extension: names in code become links, so that Markdown needs no roles and also reads on GitHub.

A public name of the library links to its API page, and a name of torch or of a host to that project's pages, where
intersphinx knows them. Links to tutorials are written to their scripts, which exist on GitHub, and lead to the pages.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?")
HOSTS = ("torch.", "torch_geometric.", "e3nn.", "escnn.")
LINKED = (nodes.reference, nodes.title, pending_xref)


def names(doctree: nodes.document) -> list[tuple[nodes.literal, str]]:
    """Code of one line outside of links and headings, with the name that it begins with."""
    found = [(node, NAME.fullmatch(node.astext())) for node in doctree.findall(nodes.literal)]
    return [
        (node, match[1]) for node, match in found if match and not isinstance(node.parent, LINKED)
    ]


def tutorials_by_page(app, docname: str, source: list[str]) -> None:
    source[0] = re.sub(
        r"\]\((?:docs/)?gallery/(tutorial_\w+)\.py\)", r"](tutorials/\1.rst)", source[0]
    )


def included(app, path, docname: str, content: list[str]) -> None:
    """Links of README to files of the repository that are pages of the site."""
    tutorials_by_page(app, docname, content)
    content[0] = re.sub(
        r"\]\((CHANGELOG|CONTRIBUTING)\.md\)",
        lambda match: f"](docs/{match[1].lower()}.md)",
        content[0],
    )


def hosts_by_intersphinx(app, doctree: nodes.document) -> None:
    for node, name in names(doctree):
        if name.startswith(HOSTS):
            options = {"refdomain": "py", "reftype": "obj", "reftarget": name, "refwarn": False}
            node.replace_self(pending_xref("", node.deepcopy(), refdoc=app.env.docname, **options))


def own_names(app, doctree: nodes.document, docname: str) -> None:
    if docname.startswith("api/"):
        return
    objects = app.env.domains.python_domain.objects
    public = {
        name: entry
        for name, entry in objects.items()
        if entry.objtype in ("class", "function", "data")
    }
    by_name = {name.rpartition(".")[2]: entry for name, entry in public.items()}
    for node, name in names(doctree):
        entry = public.get(f"tg_equiattn.{name}") or public.get(name) or by_name.get(name)
        if entry is not None:
            link = make_refnode(app.builder, docname, entry.docname, entry.node_id, node.deepcopy())
            node.replace_self(link)


def setup(app) -> dict[str, bool]:
    app.connect("source-read", tutorials_by_page)
    app.connect("include-read", included)
    app.connect("doctree-read", hosts_by_intersphinx)
    app.connect("doctree-resolved", own_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
