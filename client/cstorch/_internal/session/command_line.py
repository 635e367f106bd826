"""The command line of the script, as those who look at its job see it: cut, and without secrets."""

import os
import re
from collections.abc import Sequence
from typing import Final

MAX_ARGUMENTS: Final = 200
MAX_CHARACTERS: Final = 4000
HIDDEN: Final = "***"
CUT: Final = "..."

# The paths in sys.argv of a process that runs no script file: an interactive one, `python -c`, `python -`, and a
# notebook's kernel.
_NO_SCRIPT: Final = ("", "-", "-c", "ipykernel_launcher.py", "colab_kernel_launcher.py")
_SECRET_NAME: Final = re.compile(
    r"(token|password|passwd|passphrase|credentials?|secret|(api|access|auth|account|private|secret)[-_.]?key)$",
    re.IGNORECASE,  # at the end: --hf_token, and neither --tokenizer nor --max_tokens
)
_PASSWORD_IN_ADDRESS: Final = re.compile(r"(://[^/@:\s]*:)[^/@\s]+@")


def command_line(argv: Sequence[str]) -> Sequence[str]:
    """Returns the absolute path of the script, then its arguments; empty if the process runs no script.

    The path is as in `argv` where the current folder has been removed.

    The value of an argument whose name is that of a secret (--token, api_key=) is replaced, as is the password in an
    address. A long command line ends with "...".

    Args:
        argv: As `sys.argv`.
    """
    if not argv or os.path.basename(argv[0]) in _NO_SCRIPT:
        return ()
    try:
        script = os.path.abspath(argv[0])
    except FileNotFoundError:  # The current folder has been removed.
        script = argv[0]
    shown, characters = [script[:MAX_CHARACTERS]], 0
    for argument in _without_secrets(argv[1:]):
        characters += len(argument)
        if len(shown) >= MAX_ARGUMENTS or characters > MAX_CHARACTERS:
            return (*map(_encodable, shown), CUT)
        shown.append(argument)
    return tuple(map(_encodable, shown))


def _without_secrets(arguments: Sequence[str]) -> Sequence[str]:
    shown = []
    hides_next = False
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        is_option = argument.startswith("-")
        if hides_next and not is_option:
            shown.append(HIDDEN)
        elif separator and _SECRET_NAME.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_PASSWORD_IN_ADDRESS.sub(rf"\1{HIDDEN}@", argument))
        hides_next = is_option and not separator and _SECRET_NAME.search(name) is not None
    return shown


def _encodable(text: str) -> str:
    """The text without the lone surrogates that stand for bytes of an argument that are no UTF-8."""
    return text.encode(errors="replace").decode()
