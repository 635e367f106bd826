"""A step that a client has had compiled, as it is needed to run it later, and on another job too."""

import re
from dataclasses import dataclass
from typing import Final

from wsc.v1 import coordinator_pb2

_INPUT_NAME: Final = re.compile(r'\bcs\.input_name = "([^"\\]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What of the cluster a step was compiled for."""

    num_csx: int
    num_workers_per_csx: int
    max_wgt_servers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """The text is kept: a client that begins its job anew does not compile again, and the artifact is in the cache."""

    text: str
    resources: Resources
    response: coordinator_pb2.CompileResponse

    @property
    def input_names(self) -> list[str]:
        """The tensors of a batch that the step takes, in its order."""
        header = next((line for line in self.text.splitlines() if line.lstrip().startswith("func ")), "")
        return _INPUT_NAME.findall(header)
