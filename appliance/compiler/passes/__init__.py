"""Passes: changes of a module that keep its meaning, one a file."""
