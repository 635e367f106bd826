"""`python -m waferbox` is the command `waferbox`."""

from waferbox.host.memory import collect_seldom
from waferbox.launch.installation import begin_process


def main() -> None:
    """Runs the command. Its modules, which import gRPC and packages of process kinds, are imported here."""
    begin_process()
    collect_seldom()
    from waferbox.commands.cli import run

    run()


if __name__ == "__main__":
    main()
