"""Text for users."""


def on_one_line(text: str) -> str:
    """A message of several lines on one: "lost 2 times: 1. wafer-0 died; 2. no link"."""
    made = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        separator = " " if made.endswith(":") else "; "
        made = f"{made}{separator}{line}" if made else line
    return made
