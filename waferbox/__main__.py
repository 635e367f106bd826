"""`python -m waferbox` is the command `waferbox`."""

import sys

from waferbox.host.memory import collect_seldom
from waferbox.launch.installation import begin_process


def main() -> None:
    """Runs the command. Its modules, which import gRPC and packages of process kinds, are imported here."""
    begin_process()
    collect_seldom()
    from waferbox.commands.cli import app
    from waferbox.output.console import Status, print_error
    from waferbox.security.tls import TlsError
    from waferbox.settings import SettingError

    try:
        app()
    except (SettingError, TlsError) as error:
        print_error(str(error))
        sys.exit(Status.USAGE)


if __name__ == "__main__":
    main()
