"""Notebooks: whether the script is one, and the compile report of an execution as HTML that it shows inline."""

import sys
from html import escape
from pathlib import Path
from typing import Any, Final

from waferbox.execution_folders import read_execution

# A frame keeps the style of the page from the notebook, and that of the notebook from the page; no script runs in it.
_FRAME: Final = (
    '<iframe title="Compile report" sandbox style="width: 100%; height: 38rem; border: 1px solid #8886; '
    "border-radius: 0.5rem; resize: vertical\" srcdoc='{}'></iframe>"
)


def notebook_shell() -> Any:
    """Returns the shell of IPython in which this process runs the user's code, as in a notebook; None: in none."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def inline_report(folder: Path) -> str | None:
    """Returns the page of the compile report in a frame; if the page is on another host, a line that says where.

    None: the step of the execution is not compiled. folder: of the execution.
    """
    record = read_execution(folder).record
    page = None if record is None else record.report_page
    if page is None:
        return None
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return (
            "<p>The compile report cannot be read here: it is on the cluster's host, in "
            f"<code>{escape(str(page))}</code>. <code>waferbox page</code> shows it with its job.</p>"
        )
    return _FRAME.format(text.replace("&", "&amp;").replace("'", "&#39;"))
