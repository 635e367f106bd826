"""Runs walk.py for many files in a row, in forks of a process that has nothing but h5py: `walk_forks.py WALK_SCRIPT`.

A line with a file's name in, a line of JSON out: the exit status, and what was printed.
"""

import importlib.util
import json
import os
import sys

SECONDS = "0.5"


def main(script: str) -> None:
    spec = importlib.util.spec_from_file_location("walk", script)
    assert spec is not None
    assert spec.loader is not None
    walk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walk)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(write, sys.stdout.fileno())
            status = walk.main(line.rstrip("\n"), SECONDS)
            sys.stdout.flush()
            os._exit(status)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
