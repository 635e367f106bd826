"""A process that has the client imported, and what it imports in a step, and forks for each script of the tests.

A forked script is, but for that, what `python script.py` is: its main module, arguments, folder, environment, path,
session and end are its own.
"""

import gc
import mmap
import os
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from forking_server import ForkedProcess, ForkingServer, end_after, serve

from waferbox import settings


class ScriptServer(ForkingServer):
    """Owns the process, which ends when this object is closed, or with this process."""

    def __init__(self, temporary: Path) -> None:
        """temporary: a folder for what torch leaves behind."""
        super().__init__(Path(__file__), temporary)

    def start(
        self, script: Path, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], outputs: Sequence[int]
    ) -> ForkedProcess:
        """outputs: descriptors for standard output and error."""
        with open(os.devnull, "rb") as nothing:
            fds = dict(enumerate([nothing.fileno(), *outputs]))
            return self.fork([str(script), *arguments], folder, variables, fds)


def main() -> None:
    """The server; and the script, in whose process this ends as that of a Python that ran it."""
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401

    from cstorch._internal.checked_backend.backends import install_check
    from cstorch.distributed import streaming

    gc.collect()
    gc.freeze()  # what is here stays shared with the scripts
    serve(socket.socket(fileno=int(sys.argv[1])))
    streaming._asked = mmap.mmap(-1, len(streaming._asked))  # the scripts would share this memory
    if settings.CHECK.is_set():  # the import of cstorch would have read it
        install_check()
    script = Path(sys.argv[0]).absolute()
    sys.path[0] = str(script.parent)
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    end_after(lambda: exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__))


if __name__ == "__main__":
    main()
