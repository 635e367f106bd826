"""Whole modules: building, verifying and reading them as graphs."""
