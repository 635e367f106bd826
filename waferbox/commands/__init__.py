"""The commands, and how they reach a cluster."""
