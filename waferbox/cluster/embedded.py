"""`python -m waferbox.cluster.embedded`: a cluster of child processes for the process that starts it.

Once all nodes have registered, the process prints one line of JSON, {"management": "host:port", "page": "URL or empty",
"vendor_config": "file or empty"}. It runs until its standard input or its owner ends (not with --starter up), SIGTERM,
or a shutdown of the cluster.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from waferbox.cluster.launcher import ClusterSettings, ForkingLauncher
from waferbox.host.process_limits import failed_start, thread_shortage
from waferbox.launch.local_clusters import ClusterError, Starter, recorded
from waferbox.launch.stop_signals import StopSignals
from waferbox.roles import WORKER
from waferbox.security.tokens import fix_secret_file
from waferbox.settings import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `up` and `run`."""
    defaults = ClusterSettings()
    parser.add_argument("--wafers", type=int, default=defaults.wafers)
    parser.add_argument("--memoryx", type=int, help="default: one")
    parser.add_argument("--workers", type=int, help="in all; default: one for each wafer")
    parser.add_argument("--swarmx", type=int, help="default: as many as a tree over the wafers has")
    parser.add_argument("--threads", type=int, help="of each wafer; default: its share of the cores")
    parser.add_argument("--state-dir", metavar="DIR", help="where MemoryX keeps weights and optimizer state")
    parser.add_argument("--memory-limit", metavar="SIZE", help="of each shard of MemoryX, such as 8g")
    parser.add_argument("--listen", default=defaults.listen, metavar="HOST:PORT")
    parser.add_argument("--page", metavar="HOST:PORT", help="where management serves a page; default: nowhere")
    parser.add_argument("--next-free", action="store_true", help="take the next free port if that of --listen is taken")
    parser.add_argument("--page-next-free", action="store_true", help="the same for --page")
    parser.add_argument("--metrics", action="store_true", help="every process serves metrics for Prometheus")
    parser.add_argument("--cache-root", metavar="DIR")
    parser.add_argument("--vendor-python", metavar="PATH", help="serve the vendor's client, whose interpreter this is")
    parser.add_argument("--compile-root", metavar="DIR", help="default: all folders; with --starter up none")
    parser.add_argument(
        "--starter", type=Starter, choices=list(Starter), default=Starter.SCRIPT, help="up: run until shut down"
    )
    parser.add_argument("--name", default="script", help="by which commands find it")
    parser.add_argument("--owner", type=int, metavar="PID", help="end with this process, not with standard input")
    parser.add_argument("--log", type=Path, help="with --starter up: the log file, which is removed at the end")


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
    switches = {
        "--metrics": settings.metrics,
        "--next-free": settings.next_free,
        "--page-next-free": settings.page_next_free,
    }
    return [*words, *(option for option, is_on in switches.items() if is_on)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m waferbox.cluster.embedded", description=__doc__)
    add_arguments(parser)
    options = vars(parser.parse_args(argv))
    starter, name, log, owner = (options.pop(option) for option in ("starter", "name", "log", "owner"))
    if starter is not Starter.UP:
        options["compile_root"] = options["compile_root"] or "/"  # the cluster serves one script, of the same user
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's SIGINT is for the script
    signals = StopSignals(signal.SIGTERM)
    stop_requests = [signals.fileno()]
    if owner is not None:
        stop_requests.append(os.pidfd_open(owner))
    elif starter is not Starter.UP:
        stop_requests.append(sys.stdin.fileno())
    try:
        fix_secret_file()
        launcher = ForkingLauncher()  # its fork server imports torch while this process imports gRPC
        from waferbox.cluster.cluster import Cluster

        settings = ClusterSettings(**options)
        with (
            Cluster(settings, launcher, stop_requests) as cluster,
            recorded(
                starter,
                name,
                cluster.management,
                cluster.page,
                log,
                wafers=settings.wafers,
                workers=settings.roles[WORKER.module],
            ) as on_given_up,
        ):
            described = {
                "management": cluster.management,
                "page": cluster.page,
                "vendor_config": cluster.vendor_config,
            }
            print(json.dumps(described), flush=True)
            cluster.supervise(on_given_up)
    except (ClusterError, SettingError, OSError, RuntimeError) as error:
        if not (isinstance(error, (ClusterError, SettingError, OSError)) or thread_shortage(error)):
            raise
        reason = failed_start(error) if isinstance(error, OSError) else thread_shortage(error) or error
        print(f"waferbox: {reason}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
