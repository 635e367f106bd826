"""Figures on the terminal."""

import statistics
from collections.abc import Sequence


def show(label: str, values: Sequence[float], unit: str) -> None:
    """The median of several runs, and their range."""
    spread = f"of {len(values)}: {min(values):.2f} to {max(values):.2f}" if len(values) > 1 else "once"
    print(f"  {label:44s} {statistics.median(values):9.2f} {unit}   ({spread})", flush=True)


def show_pairs(ours: str, our_values: Sequence[float], theirs: str, their_values: Sequence[float], unit: str) -> None:
    """Two things measured in turns, and how many times the second the first is."""
    show(theirs, their_values, unit)
    show(ours, our_values, unit)
    show("ratio", [a / b for a, b in zip(our_values, their_values, strict=True)], "x")
