"""Runs seeds of the simulated cluster: python tests/simulation [--seeds N] [--first N].

The exit status is 1 if one fails. A seed that fails is shown with as few of its faults as still fail, and with what
happened.
"""

import argparse
import gc
import logging
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = len(os.sched_getaffinity(0))
sys.path[:0] = [str(ROOT), str(ROOT / "tests/shared")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed; default: %(default)s")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(NUM_PROCESSES, initializer=prepare) as pool:
        os.environ["WAFERBOX_SECRET_FILE"] = str(Path(folder) / "cluster.key")
        os.environ["WAFERBOX_RECOVERY_SECONDS"] = "3"
        seeds = range(options.first, options.first + options.seeds)
        for number, failure in enumerate(pool.map(partial(run, folder), seeds, chunksize=20), 1):
            if failure:
                failed += 1
                print(f"\n{failure}\n", flush=True)
            if number % 100 == 0 or number == options.seeds:
                print(f"\r{number} of {options.seeds} seeds, {failed} failed", end="", flush=True)
    print()
    return 1 if failed else 0


def prepare() -> None:
    """Prepares a process for seeds: nothing is logged, and garbage collections do not search the imported modules."""
    import simulated_cluster  # noqa: F401

    from waferbox.host.memory import collect_seldom

    logging.disable(logging.CRITICAL)
    gc.freeze()
    collect_seldom()


def run(folder: str, seed: int) -> str:
    from simulated_cluster import shortest_failure

    return shortest_failure(seed, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
