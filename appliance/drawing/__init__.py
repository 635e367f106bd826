"""Drawings and numbers as text, for the compile report and the page."""
