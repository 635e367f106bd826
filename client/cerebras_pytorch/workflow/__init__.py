"""Only holds `python`."""
