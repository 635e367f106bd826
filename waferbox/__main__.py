"""`python -m waferbox` is the command `waferbox`."""

from waferbox.cli import main

if __name__ == "__main__":
    main()
