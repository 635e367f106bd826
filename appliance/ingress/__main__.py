"""`python -m appliance.ingress`: the entry to a cluster from outside, and the home of its coordinators."""

from waferbox.launch.installation import begin_process

if __name__ == "__main__":
    begin_process()  # before the imports, one of which is gRPC

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from appliance.ingress.process import Ingress, IngressSettings
from waferbox.host.folders import cache_root
from waferbox.launch.fork_server_process import COORDINATOR_PRELOAD, own_fork_server
from waferbox.runtime.node import add_arguments, serve


def parse_arguments(argv: Sequence[str] | None) -> IngressSettings:
    parser = argparse.ArgumentParser(prog="python -m appliance.ingress", description="The way in from outside.")
    add_arguments(parser, "where clients reach the cluster")
    parser.add_argument(
        "--cache-root",
        type=Path,
        default=cache_root(),
        metavar="DIR",
        help="compiled artifacts, best the folder of the management service; default: %(default)s",
    )
    parser.add_argument(
        "--compile-root",
        type=Path,
        metavar="DIR",
        help="let scripts have their artifacts in folders below this one; default: below the cache root alone",
    )
    options = parser.parse_args(argv)
    return IngressSettings(
        management=options.management,
        listen=options.listen,
        cache_root=options.cache_root.absolute(),
        compile_root=None if options.compile_root is None else options.compile_root.absolute(),
        metrics_port=options.metrics_port,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, which also end the coordinators."""
    settings = parse_arguments(argv)
    with own_fork_server(COORDINATOR_PRELOAD):
        return serve(lambda: Ingress(settings))


if __name__ == "__main__":
    sys.exit(main())
