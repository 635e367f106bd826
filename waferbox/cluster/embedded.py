"""`python -m waferbox.cluster.embedded`: a cluster of child processes for the process that starts it.

Prints one line of JSON, {"management": "host:port", "page": "URL, or nothing", "vendor_config": "file, or nothing"},
when all nodes are there, and lives until its standard input ends, SIGTERM comes, or somebody shuts the cluster down.
With --detached it does not look at its standard input.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from waferbox.cluster.launcher import ClusterSettings, ForkingLauncher
from waferbox.launch.stop_signals import StopSignals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `up` and `run`."""
    defaults = ClusterSettings()
    parser.add_argument("--wafers", type=int, default=defaults.wafers)
    parser.add_argument("--memoryx", type=int, default=defaults.memoryx)
    parser.add_argument("--workers", type=int, help="in all; default: one for each wafer")
    parser.add_argument("--swarmx", type=int, help="default: as many as a tree over the wafers has")
    parser.add_argument("--threads", type=int, help="of a wafer at most; default: its share of the cores")
    parser.add_argument("--state-dir", metavar="DIR", help="where MemoryX keeps weights and optimizer state")
    parser.add_argument("--memory-limit", metavar="SIZE", help="of each shard of MemoryX, such as 8g")
    parser.add_argument("--listen", default=defaults.listen, metavar="HOST:PORT")
    parser.add_argument("--page", metavar="HOST:PORT", help="where management serves a page; default: nowhere")
    parser.add_argument("--metrics", action="store_true", help="every process serves figures for Prometheus")
    parser.add_argument("--cache-root", metavar="DIR")
    parser.add_argument("--vendor-python", metavar="PATH", help="serve the vendor's client, whose interpreter this is")
    parser.add_argument("--compile-root", metavar="DIR", help="default: of a detached cluster none, else all folders")
    parser.add_argument("--detached", action="store_true", help="live until shut down; be found by `waferbox status`")
    parser.add_argument("--log", type=Path, help="of a detached cluster: the file to take away at the end")


def arguments(settings: ClusterSettings) -> list[str]:
    """The command line that gives these settings."""
    given = {
        "--wafers": settings.wafers,
        "--memoryx": settings.memoryx,
        "--workers": settings.workers,
        "--swarmx": settings.swarmx,
        "--threads": settings.threads,
        "--state-dir": settings.state_dir,
        "--memory-limit": settings.memory_limit,
        "--listen": settings.listen,
        "--page": settings.page,
        "--cache-root": settings.cache_root,
        "--compile-root": settings.compile_root,
        "--vendor-python": settings.vendor_python,
    }
    words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return [*words, "--metrics"] if settings.metrics else words


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m waferbox.cluster.embedded", description=__doc__)
    add_arguments(parser)
    options = vars(parser.parse_args(argv))
    detached, log = options.pop("detached"), options.pop("log")
    if not detached:
        options["compile_root"] = options["compile_root"] or "/"  # it is for one script, of the same user
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the script
    signals = StopSignals(signal.SIGTERM)
    stop_requests = [signals.fileno()] if detached else [signals.fileno(), 0]
    launcher = ForkingLauncher()  # its fork server imports torch while this process imports gRPC
    from waferbox.cluster.cluster import Cluster, ClusterError
    from waferbox.cluster.local_clusters import recorded

    try:
        with Cluster(ClusterSettings(**options), launcher, stop_requests) as cluster:
            note: AbstractContextManager[Callable[[str], None]]
            note = recorded(cluster.management, os.getpid(), log) if detached else nullcontext(lambda message: None)
            with note as on_given_up:
                described = {
                    "management": cluster.management,
                    "page": cluster.page,
                    "vendor_config": cluster.vendor_config,
                }
                print(json.dumps(described), flush=True)
                cluster.supervise(on_given_up)
    except ClusterError as error:
        print(f"waferbox: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
