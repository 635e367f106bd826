"""The command `waferbox`: its subcommands, and their connection to a cluster."""
