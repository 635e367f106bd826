"""Drawings and numbers for people, which the compile report and the page have in common."""
