"""`python -m vendor_gateway`: serves the vendor's own client on a Waferbox cluster."""

from waferbox.launch.installation import begin_process

if __name__ == "__main__":
    begin_process()  # before the imports, one of which is gRPC

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from vendor_gateway.process import GatewaySettings, VendorGateway
from waferbox.runtime.node import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, which end the clients' jobs too."""
    parser = argparse.ArgumentParser(prog="python -m vendor_gateway", description="Serves the vendor's own client.")
    parser.add_argument("--management", required=True, metavar="HOST:PORT", help="the management service")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="the address for clients; default: %(default)s"
    )
    parser.add_argument(
        "--input-python",
        default=sys.executable,
        metavar="PATH",
        help="the interpreter of the clients' environment, under which workers run their input functions",
    )
    parser.add_argument("--insecure", action="store_true", help="allow jobs of everybody who reaches it")
    parser.add_argument("--announce-fd", type=int, metavar="FD", help="write the address to this descriptor")
    options = parser.parse_args(argv)
    settings = GatewaySettings(
        management=options.management,
        listen=options.listen,
        input_python=os.path.abspath(options.input_python),
        insecure=options.insecure,
    )
    with ExitStack() as files:
        announce = None
        if options.announce_fd is not None:
            announce = files.enter_context(open(options.announce_fd, "w", encoding="ascii"))
        return serve(lambda: VendorGateway(settings, announce))


if __name__ == "__main__":
    sys.exit(main())
