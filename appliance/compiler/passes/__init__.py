"""Passes: changes of a module that keep its meaning, a file for each."""
