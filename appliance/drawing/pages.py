"""Jinja templates for pages: escaped, with numbers as text, on the style and the base that all pages share.

A page that is one file extends `page.html`, which contains the style.
"""

from pathlib import Path
from typing import Final

import jinja2

from appliance.drawing.number_text import bytes_text, count_text, seconds_text

_TEMPLATES: Final = Path(__file__).with_name("templates")
STYLE: Final = _TEMPLATES / "report.css"


def template_environment(folder: Path) -> jinja2.Environment:
    """The environment of the templates in a folder. They may use those of this package."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": bytes_text, "count": count_text, "seconds": seconds_text}
    return environment
