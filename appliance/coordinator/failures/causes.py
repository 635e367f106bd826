"""Why a node is replaced, in one line for the user: what it has said, and where in the code it was."""

import re
from typing import Final

from wsc.v1 import node_pb2

MAX_FRAMES: Final = 3  # of a stack that are told

_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)


def cause_of_replacement(failure: node_pb2.Failure, description: str) -> str:
    """description: of the node, in place of its name at the beginning of what it says; see JobNodes.describe."""
    cause = f"{description} {failure.message.removeprefix(f'{failure.node} ')}"
    frames = list(_FRAME.finditer(failure.traceback))[-MAX_FRAMES:]
    where = ", ".join(f"{_name(frame['path'])}:{frame['line']} in {frame['function']}" for frame in frames)
    return f"{cause} ({where})" if where else cause


def _name(path: str) -> str:
    """Its last two parts: files of one name are in many folders."""
    return "/".join(path.split("/")[-2:])
