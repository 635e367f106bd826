"""`python -m waferbox` is the command `waferbox`."""

from waferbox.commands.cli import main

if __name__ == "__main__":
    main()
