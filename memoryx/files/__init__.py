"""The memory that states lie in, and which parts of it are in memory where it is a file."""
