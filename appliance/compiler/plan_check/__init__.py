"""Checking a plan that was read from disk or received."""
