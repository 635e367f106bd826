"""The documentation site: `make site` builds the pages of docs/ into build/site with Sphinx. Any warning fails."""

import importlib
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from waferbox import __version__

FOLDER = Path(__file__).parent
MODULES = re.findall(r"^   (cstorch\S*)$", (FOLDER.parent / "api.rst").read_text(), re.MULTILINE)

project = "Waferbox"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
root_doc = "index"
exclude_patterns = ["site"]
templates_path = [str(FOLDER / "templates")]

html_theme = "furo"
html_title = f"Waferbox {__version__}"
html_static_path = [str(FOLDER / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

highlight_language = "none"  # an indented block is as often output as a program
copybutton_prompt_text = "$ "  # with prompts, only the commands are copied
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

default_role = "code"  # docstrings write `names` in single backticks
autodoc_inherit_docstrings = False  # torch's own are written for torch's site
autodoc_member_order = "bysource"
napoleon_use_rtype = False


def link_within_the_site(app: Sphinx, relative_path: Path, parent: str, content: list[str]) -> None:
    """Lets the README, which is included in the first page, link to the changelog's page."""
    content[0] = content[0].replace("](CHANGELOG.md)", "](docs/changelog.md)")


def link_to_included_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Lets pages link to README.md and CHANGELOG.md above docs/, which are pages of the site too."""
    source[0] = source[0].replace("](../README.md)", "](index.md)").replace("](../CHANGELOG.md)", "](changelog.md)")


def is_described_elsewhere(app: Sphinx, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Whether a member of a module is torch's, or is on the page of a module that docs/api.rst has before this one."""
    if kind != "module":
        return None
    if getattr(member, "__module__", None) is not None and member.__module__.startswith("torch."):
        return True
    exporting = [module for module in MODULES if getattr(importlib.import_module(module), name, None) is member]
    return True if exporting and app.env.docname != f"api/{exporting[0]}" else None


def setup(app: Sphinx) -> None:
    app.connect("include-read", link_within_the_site)
    app.connect("source-read", link_to_included_pages)
    app.connect("autodoc-skip-member", is_described_elsewhere)
