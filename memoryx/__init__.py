"""MemoryX: a weight server."""
