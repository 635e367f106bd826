"""Writes docs/settings.md, all environment variables, from waferbox/settings.py. `python docs/settings.py`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from waferbox.settings import VARIABLES, Variable

PAGE: Final = Path(__file__).parent / "settings.md"

# Docker Compose reads these in docker-compose.yml and deploy/; no process of Waferbox does.
COMPOSE_VARIABLES: Final[Mapping[str, str]] = {
    "WAFERBOX_PORT": "the port of the ingress on this machine (9000)",
    "WAFERBOX_PAGE_PORT": "the port of the page on this machine (9001)",
    "WAFERBOX_MOUNT": "the folder that workers see (the current folder)",
    "WAFERBOX_STATES": "the folder on a disk for weights and optimizer state (`deploy/larger-than-memory.yml`)",
}


def page() -> str:
    """The page as it is now."""
    of_users = _table((variable for variable in VARIABLES if not variable.is_internal), "read by")
    internal = _table((variable for variable in VARIABLES if variable.is_internal), "from and to")
    compose = "\n".join(f"* `{name}`: {meaning}" for name, meaning in COMPOSE_VARIABLES.items())
    return (
        "# Settings\n\n"
        "Every environment variable of Waferbox. `python docs/settings.py` writes this page from "
        "`waferbox/settings.py`. An empty text is the same as no text.\n\n"
        f"## Set by users\n\n{of_users}\n\n"
        f"## Passed from process to process\n\nUsers do not set these.\n\n{internal}\n\n"
        f"## Read by Docker Compose\n\n{compose}\n"
    )


def _table(variables: Iterable[Variable[object]], last: str) -> str:
    rows = [f"| variable | value | default | meaning | {last} |", "|---|---|---|---|---|"]
    for variable in variables:
        default = variable.default
        default_text = variable.default_text or (f"{default:g}" if isinstance(default, float) else str(default))
        rows.append(
            f"| `{variable.name}` | {variable.form.text} | {default_text} | {variable.meaning} | {variable.readers} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
