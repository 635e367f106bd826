"""The command `waferbox`."""
