"""Checks a plan that was read from disk."""
