"""Checked runs, for `waferbox check`: the script runs unchanged, and its steps, states and mistakes are recorded."""
