"""The life of a node: its registration with management, and one job at a time."""
