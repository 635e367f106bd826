"""The table of operations: one row for each, and the types of its results."""
