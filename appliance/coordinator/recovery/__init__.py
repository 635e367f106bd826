"""Recovery from deaths: replacements, or fewer wafers, and a new epoch from the last recovery point."""
