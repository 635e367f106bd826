"""What the processes of a Waferbox cluster share, and the command `waferbox`."""

__version__ = "0.1.0"
